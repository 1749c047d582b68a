"""The effective configuration, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.config.introspect import is_secret, leaves
from specdec.config.load import DEFAULT, setting_paths
from specdec.config.schema import EngineConfig, SpeculativeConfig


@attrs.frozen
class Setting:
    """One line of the effective configuration."""

    path: str
    value: Any
    """As a file would write it: plain values."""
    origin: str
    doc: str


HIDDEN = "hidden"
"""Stands for the value of a secret."""


def describe(config: Any, sources: Mapping[str, str] | None = None, section: str = "") -> list[Setting]:
    """Every setting with its value, origin and meaning; secrets with their values hidden.

    Args:
        config: the engine's configuration, or that of a command's own table.
        sources: origins by dotted path, from `load` or `load_table`; a setting that is missing there is called default.
        section: the name of the table; empty for the engine.
    """
    values = {section: to_dict(config)} if section else to_dict(config)
    found = {leaf.path: leaf for leaf in leaves(type(config), section)}
    settings = []
    for path in setting_paths(config) if isinstance(config, EngineConfig) else found:
        leaf, value = found.get(path), _look_up(values, path)
        if leaf is not None and value and is_secret(leaf.attribute):
            value = HIDDEN
        doc = leaf.doc if leaf else "option of the method" if "." in path else "How draft tokens are proposed."
        settings.append(Setting(path, value, (sources or {}).get(path, DEFAULT), doc))
    return settings


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values; what a file would hold, and equal to it when read back."""
    return _plain_class(config)


def to_toml(
    config: EngineConfig, sources: Mapping[str, str] | None = None, tables: Mapping[str, Any] | None = None
) -> str:
    """The configuration as a TOML file that loads to an equal configuration; settings that are None stand as comments.

    Args:
        config: the configuration.
        sources: when given, each line ends in a comment that says where the value came from.
        tables: configurations of commands' own tables, by name. Their secrets are left out, with a comment.
    """
    lines = _toml_table(to_dict(config), "", sources)
    for name, table in (tables or {}).items():
        values = to_dict(table)
        secrets = [a.name for a in attrs.fields(type(table)) if is_secret(a) and values.pop(a.name)]
        notes = [f"# {secret} is secret: set it by hand" for secret in secrets]
        lines += ["", f"[{name}]", *notes, *_toml_table(values, name, sources)]
    return "\n".join(lines) + "\n"


def toml_of(values: Mapping[str, Any]) -> str:
    """Nested plain values as the text of a TOML file; those that are None are left out."""
    return "\n".join(_toml_table({key: value for key, value in values.items() if value is not None}, "", None)) + "\n"


def _plain_class(instance: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for attribute in attrs.fields(type(instance)):
        value = getattr(instance, attribute.name)
        if attrs.has(type(value)):
            value = _plain_class(value)
        elif isinstance(value, tuple):
            value = list(value)
        plain[attribute.name] = value
    if isinstance(instance, SpeculativeConfig):
        plain |= plain.pop("options")
    return plain


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def _toml_table(values: Mapping[str, Any], section: str, sources: Mapping[str, str] | None) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for key, value in values.items():
        path = f"{section}.{_toml_key(key)}" if section else _toml_key(key)
        origin = f"  # {sources[path]}" if sources and path in sources else ""
        if isinstance(value, Mapping):
            tables += ["", f"[{path}]{origin}", *_toml_table(value, path, sources)]
        elif value is None:
            lines.append(f"# {_toml_key(key)} is not set")
        else:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}{origin}")
    return lines + tables


def _toml_key(key: str) -> str:
    return key if key and key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_string(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml_value(v)}' for k, v in value.items())}}}"
    return _toml_string(str(value))


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
