"""What a configuration selects by name, with the options of each plugin: checked at once, before any file is read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.config.problems import Problems
from specdec.errors import ConfigError, PluginError
from specdec.registry.catalogue import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        ConfigError: options that are wrong, or for a plugin that is not selected; several mistakes together.
        PluginError: a plugin is not installed or cannot be used, and nothing else is wrong.
    """
    problems = Problems()
    options: dict[tuple[str, str], Any] = {}
    for kind, name, values in _wanted(config, method):
        with problems.gathered(), _at(KINDS[kind].setting):
            options[kind, name] = None if values is None else registry.plugin_config(kind, name, values)
            registry.select(kind, name)
    with problems.gathered():
        _check_tables(config)
    problems.settle()

    def chosen(kind: str, name: str) -> Chosen:
        return Chosen(name=name, options=options[kind, name])

    return Selection(
        method=None if method is None else chosen("proposer", method),
        verifier=chosen("verifier", config.verifier),
        grammar=None if config.grammar_backend == AUTO else chosen("grammar", config.grammar_backend),
        logits_processors=tuple(chosen("logits_processor", name) for name in config.logits_processors),
        stat_loggers=tuple(chosen("stat_logger", name) for name in config.stat_loggers),
    )


@contextmanager
def _at(setting: str) -> Iterator[None]:
    """Let what is raised inside about a plugin, and about no setting, be about the one that names the plugin."""
    try:
        yield
    except PluginError as error:
        error.path = error.path or setting or None
        raise


def _wanted(config: EngineConfig, method: str | None) -> Iterator[tuple[str, str, Mapping[str, Any] | None]]:
    """Kind and name of each plugin, and its options as they were given; None where it takes none."""
    if method is not None:
        assert config.speculative is not None
        model = config.speculative.model
        yield "proposer", method, {**config.speculative.options, **({} if model is None else {"model": model})}
    yield "verifier", config.verifier, config.verifier_options
    for kind, name in (("attention_backend", config.attention_backend), ("sampling_backend", config.sampling_backend)):
        if name != AUTO:
            yield kind, name, None
    if config.grammar_backend != AUTO:
        yield "grammar", config.grammar_backend, config.grammar_options
    for name in config.logits_processors:
        yield "logits_processor", name, config.logits_processor_options.get(name, {})
    for name in config.stat_loggers:
        yield "stat_logger", name, {}


def _check_tables(config: EngineConfig) -> None:
    idle = sorted(set(config.logits_processor_options) - set(config.logits_processors))
    if idle:
        raise ConfigError(
            f"logits_processor_options has a table {idle[0]!r}, but logits_processors does not name it; "
            f"it has {', '.join(config.logits_processors) or 'none'}.",
            path=f"logits_processor_options.{idle[0]}",
        )
