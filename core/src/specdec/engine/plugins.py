"""Makes an engine's grammar backend and logits processors from what its configuration selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.engine.constraints import Constraints
from specdec.errors import InvalidRequestError
from specdec.grammar.service import GrammarService
from specdec.registry.selection import Chosen
from specdec.sampling.custom import NamedProcessor

if TYPE_CHECKING:
    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.grammar.interface import GrammarBackend
    from specdec.registry import Registry
    from specdec.registry.selection import Selection
    from specdec.types import EngineContext


def make_constraints(
    config: EngineConfig,
    selection: Selection,
    registry: Registry,
    context: EngineContext,
    proposer: Proposer | None = None,
) -> Constraints:
    """The grammar service and the logits processors of an engine.

    Raises:
        ConfigError: a plugin refuses the target.
        PluginError: a plugin that was named cannot be used.
    """
    grammars = GrammarService(lambda: _backend(config, selection.grammar, registry, context))
    if selection.grammar is not None:
        grammars.backend()
    processors = [_processor(chosen, registry, context) for chosen in selection.logits_processors]
    return Constraints(context.target_info, grammars, processors, proposer)


def _processor(chosen: Chosen, registry: Registry, context: EngineContext) -> NamedProcessor:
    kind = "logits_processor"
    processor = registry.create(kind, chosen.name, kind, config=chosen.options, engine=context)
    return NamedProcessor(processor, registry.describe(kind, chosen.name))


def _backend(
    config: EngineConfig, chosen: Chosen | None, registry: Registry, context: EngineContext
) -> tuple[GrammarBackend, str]:
    if chosen is None:
        name = _only_installed(registry)
        chosen = Chosen(name=name, options=registry.plugin_config("grammar", name, config.grammar_options))
    backend = registry.create("grammar", chosen.name, "grammar", config=chosen.options, engine=context)
    return backend, registry.describe("grammar", chosen.name)


def _only_installed(registry: Registry) -> str:
    """The name of the installed grammar backend.

    Raises:
        InvalidRequestError: there is none, or there are several.
    """
    names = {str(entry.name) for entry in registry.entries() if entry.kind == "grammar" and entry.status != "blocked"}
    if not names:
        raise InvalidRequestError(
            "structured_outputs needs a grammar backend, and none is installed: pip install specdec-grammar-xgrammar"
        )
    if len(names) > 1:
        raise InvalidRequestError(
            f"structured_outputs: several grammar backends are installed: {', '.join(sorted(names))}. "
            "Set grammar_backend to one of them."
        )
    return names.pop()
