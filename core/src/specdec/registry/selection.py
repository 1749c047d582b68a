"""What a configuration selects by name, with the options of each plugin: checked at once, before any file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.config import EngineConfig
    from specdec.registry.registry import Registry

AUTO = "auto"


@frozen(kw_only=True)
class Chosen:
    """One plugin by name."""

    name: str
    options: Any
    """Instance of its `config_class`, or an empty mapping."""


@frozen(kw_only=True)
class Selection:
    """The plugins of an engine; None stands for one that is found out later, or not wanted."""

    method: Chosen | None
    verifier: Chosen
    grammar: Chosen | None
    logits_processors: tuple[Chosen, ...]
    stat_loggers: tuple[Chosen, ...]


def select_plugins(config: EngineConfig, registry: Registry, method: str | None) -> Selection:
    """Find every plugin that a configuration names, and let each check its options.

    Args:
        config: the engine's.
        registry: its plugins.
        method: name of the proposer; None where there is none or it is not known yet.

    Raises:
        ConfigError: options that are wrong, or for a plugin that is not selected.
        PluginError: a plugin is not installed or cannot be used.
    """

    def chosen(kind: str, name: str, options: Any) -> Chosen:
        return Chosen(name=name, options=registry.plugin_config(kind, name, options))

    for kind, name in (("attention_backend", config.attention_backend), ("sampling_backend", config.sampling_backend)):
        if name != AUTO:
            registry.select(kind, name)
    return Selection(
        method=None if method is None else chosen("proposer", method, _method_options(config)),
        verifier=chosen("verifier", config.verifier, config.verifier_options),
        grammar=None
        if config.grammar_backend == AUTO
        else chosen("grammar", config.grammar_backend, config.grammar_options),
        logits_processors=_processors(config, chosen),
        stat_loggers=tuple(chosen("stat_logger", name, {}) for name in config.stat_loggers),
    )


def _method_options(config: EngineConfig) -> dict[str, Any]:
    assert config.speculative is not None
    model = config.speculative.model
    return {**config.speculative.options, **({} if model is None else {"model": model})}


def _processors(config: EngineConfig, chosen: Callable[[str, str, Any], Chosen]) -> tuple[Chosen, ...]:
    options = config.logits_processor_options
    idle = sorted(set(options) - set(config.logits_processors))
    if idle:
        raise ConfigError(
            f"logits_processor_options has a table {idle[0]!r}, but logits_processors does not name it; "
            f"it has {', '.join(config.logits_processors) or 'none'}.",
            path=f"logits_processor_options.{idle[0]}",
        )
    return tuple(chosen("logits_processor", name, options.get(name, {})) for name in config.logits_processors)
