"""A plugin's options: plain values -> an instance of the plugin's own configuration class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import attrs

from specdec.config.problems import SeveralProblemsError, UnknownSettingError, join, together
from specdec.config.schema import SpeculativeConfig
from specdec.config.structure import structure
from specdec.config.vllm_keys import ADVICE
from specdec.errors import ConfigError, PluginError, SpecdecError
from specdec.registry.catalogue import KINDS
from specdec.registry.messages import contract, describe
from specdec.registry.policy import PluginEntry


def build_options(entry: PluginEntry, cls: type | None, options: Mapping[str, Any]) -> Any:
    """Build ``cls`` from ``options``; without a class no options are allowed and an empty dict comes back.

    Raises:
        ConfigError: with the path of each wrong key or value.
        PluginContractError: ``cls`` is not an attrs class, or has options that it would never get.
    """
    section = KINDS[entry.kind].section(entry.name or "") if entry.kind else ""
    if cls is None:
        problems = [_unknown(entry, join(section, key), section, ()) for key in options]
        if problems:
            raise together(problems)
        return {}
    if not attrs.has(cls):
        raise contract(entry, f"config_class returned {cls!r}, which is not an attrs class.")
    if section == SpeculativeConfig.SECTION:
        _check_names(entry, cls)
    try:
        return structure(cls, options, section)
    except ConfigError as error:
        raise _completed(entry, error, section) from error.__cause__


def _check_names(entry: PluginEntry, cls: type) -> None:
    """Refuse options with names of the core's own keys, which go to the core; ``model`` alone is passed on."""
    own = {attribute.name for attribute in attrs.fields(SpeculativeConfig)} - {"model"}
    taken = sorted(own & {attribute.name for attribute in attrs.fields(cls)})
    if taken:
        raise contract(
            entry,
            f"its option {taken[0]!r} is a key of the core's own and never reaches it: call it otherwise. What the "
            "engine is set to stands in the argument 'engine' of its hooks.",
        )


def option_names(kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of the usable plugins of a kind, and of their own options; imports their modules."""
    from specdec.registry.registry import Registry

    registry = Registry()
    for entry in registry.entries():
        if entry.kind != kind or entry.status != "ok" or entry.name is None:
            continue
        with suppress(PluginError):
            plugin = registry.load(kind, entry.name)
            cls = plugin.build("config_class") if plugin.implements("config_class") else None
            if cls is not None and attrs.has(cls):
                yield entry.name, tuple(attribute.name for attribute in attrs.fields(cls))


def _completed(entry: PluginEntry, error: SpecdecError, section: str) -> SpecdecError:
    if isinstance(error, SeveralProblemsError):
        return SeveralProblemsError([_completed(entry, problem, section) for problem in error.problems])
    if isinstance(error, UnknownSettingError) and error.path is not None:
        return _unknown(entry, error.path, section, error.known)
    return error


def _unknown(entry: PluginEntry, path: str, section: str, known: tuple[str, ...]) -> ConfigError:
    """An unknown key; the core's own keys of the section are valid beside the method's, and may be what was meant."""
    if section != SpeculativeConfig.SECTION:
        return UnknownSettingError(path, known)
    core_keys = tuple(field.name for field in attrs.fields(SpeculativeConfig) if field.name != "options")
    key = path.removeprefix(f"{section}.")
    if key in core_keys:
        return ConfigError(f"{path} is set, but the {describe(entry)} has no use for it: leave it out.", path=path)
    return UnknownSettingError(path, (*known, *core_keys), advice=ADVICE.get(key))
