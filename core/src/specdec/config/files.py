"""Configuration files: TOML, YAML and JSON, with the line that each setting stands on."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.config.problems import join
from specdec.errors import ConfigError
from specdec.wording import reason_of

if TYPE_CHECKING:
    import yaml

DEFAULT_NAMES = ("specdec.toml", "specdec.yaml", "specdec.yml", "specdec.json")
"""Looked for in the working directory when no file is named."""


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a configuration file.

    Returns:
        Its values, and the origin (``file:line``) of each by dotted path.

    Raises:
        ConfigError: there is no such file, it cannot be parsed, or it does not hold a table.
    """
    parse = {".toml": _parse_toml, ".yaml": _parse_yaml, ".yml": _parse_yaml, ".json": _parse_json}.get(path.suffix)
    if parse is None:
        raise ConfigError(f"configuration file {path}: the name must end in .toml, .yaml, .yml or .json.")
    try:
        text = path.read_text(encoding="utf-8")
        values, lines = parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"configuration file {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} must hold a table of settings, not {type(values).__name__}.")
    return values, {key: f"{path}:{lines[key]}" if key in lines else str(path) for key in paths(values)}


def find(folder: Path) -> Path | None:
    """The configuration file of a folder, or None.

    Raises:
        ConfigError: there is more than one.
    """
    found = [folder / name for name in DEFAULT_NAMES if (folder / name).is_file()]
    if len(found) > 1:
        listed = " and ".join(path.name for path in found)
        raise ConfigError(f"{listed} are both in {folder}: remove one, or name the right one with --config.")
    return found[0] if found else None


def paths(values: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Dotted paths of a nested mapping, tables included."""
    for key, value in values.items():
        path = join(section, str(key))
        yield path
        if isinstance(value, Mapping):
            yield from paths(value, path)


# --- formats ------------------------------------------------------------------------------------


def _parse_toml(text: str) -> tuple[Any, dict[str, int]]:
    return tomllib.loads(text), _toml_lines(text)


_TOML_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_TOML_KEY = re.compile(r"""\s*([\w."'-]+(?:\s*\.\s*[\w"'-]+)*)\s*=""")


def _toml_lines(text: str) -> dict[str, int]:
    """Lines of the keys; keys inside inline tables have none of their own."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TOML_TABLE.fullmatch(line):
            section = _toml_path(table[1])
            lines.setdefault(section, number)
        elif key := _TOML_KEY.match(line):
            lines.setdefault(join(section, _toml_path(key[1])), number)
    return lines


def _toml_path(written: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in written.split("."))


def _parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    import yaml

    try:
        values = yaml.safe_load(text)
        return ({} if values is None else values), _yaml_lines(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _yaml_lines(text: str) -> dict[str, int]:
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return dict(_node_lines(root, "")) if root is not None else {}


def _node_lines(node: yaml.Node, section: str) -> Iterator[tuple[str, int]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = join(section, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _node_lines(value, path)


def _parse_json(text: str) -> tuple[Any, dict[str, int]]:
    import yaml

    values = json.loads(text, object_pairs_hook=_without_repeats)
    try:
        return values, _yaml_lines(text)  # JSON is YAML, but for tabs
    except yaml.YAMLError:
        return values, {}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {repeated[0]!r} stands twice in one object")
    return dict(pairs)
