"""Makes an engine's grammar backend and logits processors from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.engine.constraints import Constraints
from specdec.errors import ConfigError, InvalidRequestError
from specdec.grammar.service import GrammarService
from specdec.sampling.custom import NamedProcessor

if TYPE_CHECKING:
    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.grammar.interface import GrammarBackend
    from specdec.registry import Registry
    from specdec.types import EngineContext


def make_constraints(
    config: EngineConfig, registry: Registry, context: EngineContext, proposer: Proposer | None = None
) -> Constraints:
    """The grammar service and the logits processors of an engine.

    Raises:
        ConfigError: options for a processor that is not selected, or refused options.
        PluginError: a plugin that was named cannot be used.
    """
    grammars = GrammarService(lambda: _backend(config, registry, context))
    if config.grammar_backend != "auto":
        grammars.backend()
    return Constraints(context.target_info, grammars, _processors(config, registry, context), proposer)


def _processors(config: EngineConfig, registry: Registry, context: EngineContext) -> list[NamedProcessor]:
    idle = sorted(set(config.logits_processor_options) - set(config.logits_processors))
    if idle:
        raise ConfigError(
            f"logits_processor_options has a table {idle[0]!r}, but logits_processors does not name it; "
            f"it has {', '.join(config.logits_processors) or 'none'}.",
            path=f"logits_processor_options.{idle[0]}",
        )
    found = []
    for name in config.logits_processors:
        options = registry.plugin_config("logits_processor", name, config.logits_processor_options.get(name, {}))
        processor = registry.create("logits_processor", name, "logits_processor", config=options, engine=context)
        found.append(NamedProcessor(processor, registry.describe("logits_processor", name)))
    return found


def _backend(config: EngineConfig, registry: Registry, context: EngineContext) -> tuple[GrammarBackend, str]:
    name = config.grammar_backend
    if name == "auto":
        name = _only_installed(registry)
    options = registry.plugin_config("grammar", name, config.grammar_options)
    backend = registry.create("grammar", name, "grammar", config=options, engine=context)
    return backend, registry.describe("grammar", name)


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
