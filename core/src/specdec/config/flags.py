"""Command-line options generated from the fields of a configuration class: one place for names, types and help."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import attrs

from specdec.config.introspect import Leaf, leaves, unwrap_optional
from specdec.config.load import load, load_table, variable_name
from specdec.config.problems import InvalidValueError
from specdec.config.schema import EngineConfig, SpeculativeConfig
from specdec.config.sizes import is_size
from specdec.config.structure import POSITIONAL as _POSITIONAL
from specdec.config.text import is_list_of_scalars, parse_text, parse_untyped
from specdec.config.validators import find_check
from specdec.errors import ConfigError
from specdec.wording import shown

T = TypeVar("T")

_OVERRIDES = "settings"
"""Attribute of the parsed arguments that collects path -> (value, option)."""

_TABLES = "command_tables"
"""Attribute that names the commands' own tables whose settings may be among them."""

_ORIGINS = "origins_of_settings"
"""Attribute for the origins of what was read, by dotted path."""


def flag_name(path: str) -> str:
    """The option of a setting: ``kv_cache_memory`` -> ``--kv-cache-memory``."""
    return "--" + path.replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, ``--set``, ``--speculative-config`` and one option for each setting of `EngineConfig`."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a .toml, .yaml or .json file; specdec.toml of the working directory when not given",
    )
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        action=_action(_OVERRIDES, "speculative", SpeculativeConfig | None),
        help="the whole speculative table as JSON, with vLLM's keys: "
        """'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'; none switches speculation off""",
    )
    group.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action=_SetAction,
        help="any setting by its dotted path, options of the method included: --set speculative.prompt_lookup_max=4",
    )
    for leaf in _leaves(parser, EngineConfig):
        add_flag(group, leaf, flag_name(leaf.path), _OVERRIDES)


def _leaves(parser: argparse.ArgumentParser, cls: type, table: str = "") -> Iterable[Leaf]:
    """The settings that get an option: all, but none in a parser that is there for the list of commands."""
    return leaves(cls, table) if getattr(parser, "takes_settings", True) else ()


def add_table_flags(parser: argparse.ArgumentParser, cls: type, table: str) -> None:
    """Add one option for each setting of a command's own table, without the table's name: ``--port``.

    Args:
        parser: the command's parser.
        cls: the attrs class of the table.
        table: its name, a key of `specdec.config.load.COMMAND_TABLES`.
    """
    group = parser.add_argument_group(table)
    for leaf in _leaves(parser, cls, table):
        add_flag(group, leaf, flag_name(leaf.path.removeprefix(f"{table}.")), _OVERRIDES, free_text=True)
    parser.set_defaults(**{_TABLES: (*(parser.get_default(_TABLES) or ()), table)})


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Let the model be given as a positional argument too."""
    model = next((leaf for leaf in _leaves(parser, EngineConfig) if leaf.path == "model"), None)
    if model is None:
        return
    action = _action(_OVERRIDES, "model", model.annotation)
    parser.add_argument(
        _POSITIONAL,
        nargs="?",
        metavar=_POSITIONAL,
        action=action,
        default=argparse.SUPPRESS,
        help="the same as --model",
    )


def read_config(arguments: argparse.Namespace) -> tuple[EngineConfig, dict[str, str]]:
    """The configuration that the parsed options, the environment and a file make together.

    Raises:
        ConfigError: as `specdec.config.load`.
    """
    tables = getattr(arguments, _TABLES, ())
    values, origins = _given(arguments, lambda path: path.partition(".")[0] not in tables)
    config, found = load(arguments.config, values, origins=origins)
    origins_read(arguments).update(found)
    return config, found


def read_table(arguments: argparse.Namespace, cls: type[T], table: str) -> tuple[T, dict[str, str]]:
    """A command's own table, from the options of `add_table_flags`, the environment and the file.

    Raises:
        ConfigError: as `specdec.config.load_table`.
    """
    values, origins = _given(arguments, lambda path: path.partition(".")[0] == table)
    config, found = load_table(table, cls, arguments.config, values, origins=origins)
    origins_read(arguments).update(found)
    return config, found


def origins_read(arguments: argparse.Namespace) -> dict[str, str]:
    """The origins of the settings that a command has read, by dotted path; filled as it reads them."""
    origins: dict[str, str] = vars(arguments).setdefault(_ORIGINS, {})
    return origins


def _given(arguments: argparse.Namespace, wanted: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, str]]:
    """The wanted settings of the command line, and the options they came from."""
    given = {path: item for path, item in (getattr(arguments, _OVERRIDES, None) or {}).items() if wanted(path)}
    return {path: value for path, (value, _) in given.items()}, {path: option for path, (_, option) in given.items()}


def add_flag(parser: Any, leaf: Leaf, flag: str, collect_in: str, *, free_text: bool = False) -> None:
    """Add the option of one setting.

    Args:
        parser: an argument parser or group.
        leaf: the setting.
        flag: its option, with the dashes.
        collect_in: attribute of the parsed arguments that collects path -> (value, option) of what was given.
        free_text: lists of strings are given by repeating the option, because the strings may hold commas.
    """
    kind, _ = unwrap_optional(leaf.annotation)
    help_text = _help(leaf).replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, action=_boolean(collect_in, leaf.path), nargs=0, help=help_text)
        return
    repeats = free_text and is_list_of_scalars(kind, str)
    action = _action(collect_in, leaf.path, leaf.annotation, repeats=repeats)
    parser.add_argument(
        flag,
        metavar="TEXT" if repeats else _metavar(leaf, kind),
        action=action,
        help=f"{help_text}; may be repeated" if repeats else help_text,
    )


# --- help ---------------------------------------------------------------------------------------


def _help(leaf: Leaf) -> str:
    check = find_check(leaf.attribute.validator)
    acronym = leaf.doc[1:2].isupper()
    sentence = (leaf.doc if acronym else leaf.doc[:1].lower() + leaf.doc[1:]).rstrip(".")
    allowed = f"; {check.allowed}" if check and not check.names and _adds_something(check.allowed) else ""
    return f"{sentence}{allowed} (default: {_default(leaf.attribute)})"


def _adds_something(allowed: str) -> bool:
    return any(character.isdigit() or character == "'" for character in allowed)


def _default(attribute: attrs.Attribute[Any]) -> str:
    default = attribute.default
    if default is attrs.NOTHING:
        return "none, required"
    factory = getattr(default, "factory", None)
    if factory is not None:
        default = factory()
    if default is None:
        return "not set"
    if default in ((), {}, []):
        return "empty"
    if isinstance(default, tuple | list):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _metavar(leaf: Leaf, kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if is_size(kind):
        return "SIZE"
    if kind in (int, float):
        return "N" if kind is int else "X"
    if is_list_of_scalars(kind):
        return "A,B"
    if kind is Any or typing.get_origin(kind) in (dict, Mapping, list, tuple):
        return "JSON"
    return leaf.attribute.name.rpartition("_")[2].upper()


# --- actions: values are parsed as they are read, so that a message names the option ---------------


def _collect(namespace: argparse.Namespace, collect_in: str, path: str, value: Any, option: str) -> None:
    given = dict(getattr(namespace, collect_in, None) or {})
    if path in given and given[path][0] != value and _POSITIONAL in (option, given[path][1]):
        raise ConfigError(f"{path} is given twice: {shown(given[path][0])} and {shown(value)}.", path=path)
    given[path] = (value, option)
    setattr(namespace, collect_in, given)


def _action(collect_in: str, path: str, annotation: Any, *, repeats: bool = False) -> type[argparse.Action]:
    """An action that parses the text by the field's type, or gathers it when the option may be repeated."""

    class Collect(argparse.Action):
        def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
            super().__init__(option_strings, dest=argparse.SUPPRESS, **kwargs)

        def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
            option = option or self.metavar
            if repeats:
                before, _ = (getattr(namespace, collect_in, None) or {}).get(path, ([], ""))
                value: Any = [*before, values]
            else:
                value = parse_text(annotation, values, path, option)
            _collect(namespace, collect_in, path, value, option)

    return Collect


def _boolean(collect_in: str, path: str) -> type[argparse.Action]:
    class Switch(argparse.Action):
        """``--flag`` and ``--no-flag``."""

        def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
            negative = ["--no-" + option.removeprefix("--") for option in option_strings]
            super().__init__([*option_strings, *negative], dest=argparse.SUPPRESS, **kwargs)

        def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
            _collect(namespace, collect_in, path, not str(option).startswith("--no-"), str(option))

    return Switch


class _SetAction(argparse.Action):
    """``--set path=value``."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        path, equals, text = values.partition("=")
        if not equals:
            raise ConfigError(f"--set {values}: write --set PATH=VALUE, for example --set block_size=32.")
        path = path.strip()
        known = {leaf.path: leaf.annotation for leaf in leaves(EngineConfig)}
        origin = "--set"
        value = parse_text(known[path], text, path, origin) if path in known else parse_untyped(text)
        _collect(namespace, _OVERRIDES, path, value, origin)


# --- other classes, such as SamplingParams ------------------------------------------------------


def add_class_flags(
    parser: Any, cls: type, collect_in: str, *, skip: tuple[str, ...] = (), rename: Mapping[str, str] | None = None
) -> None:
    """Add one option for each field of an attrs class.

    Args:
        parser: an argument parser or group.
        cls: the class.
        collect_in: attribute of the parsed arguments that `read_class` looks at.
        skip: fields that get no option.
        rename: field -> option, where the ordinary name is taken.
    """
    for leaf in leaves(cls):
        if leaf.path not in skip:
            add_flag(parser, leaf, (rename or {}).get(leaf.path, flag_name(leaf.path)), collect_in, free_text=True)


def read_class(arguments: argparse.Namespace, build: Callable[..., Any], collect_in: str) -> Any:
    """Build an instance from the options added by `add_class_flags`; fields that were not given keep their defaults."""
    given: dict[str, tuple[Any, str]] = getattr(arguments, collect_in, None) or {}
    return build(**{path: value for path, (value, _) in given.items()})


__all__ = [
    "InvalidValueError",
    "add_class_flags",
    "add_config_flags",
    "add_flag",
    "add_table_flags",
    "flag_name",
    "origins_read",
    "read_class",
    "read_config",
    "read_table",
    "variable_name",
]
