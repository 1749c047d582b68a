"""``specdec config``: the effective configuration, and where each value came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli.commands import COMMANDS
from specdec.cli.parser import Subparsers, add_command
from specdec.config import describe, to_dict, to_toml
from specdec.config.flags import add_config_flags, add_model_argument, add_table_flags, read_config, read_table
from specdec.config.load import COMMAND_TABLES, DEFAULT
from specdec.config.problems import Problems
from specdec.config.structure import naming_origins

if TYPE_CHECKING:
    from specdec.config import EngineConfig, Setting

EXAMPLES = """\
  specdec config demo:smollm2
      every setting; what is not set anywhere shows its default
  specdec config --config specdec.toml --block-size 32
      a file, with one setting of it overruled
  specdec config demo:smollm2 --port 9000
      the options of `specdec serve`, checked without serving
  specdec config demo:smollm2 --speculative.method ngram --toml > specdec.toml
      write a file to start from"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "config",
        summary=COMMANDS["config"].summary,
        description="Check the configuration and print every setting with its value and origin: the default, a line of "
        "a file, an\nenvironment variable, or an option. Nothing is loaded but the options of the selected method. "
        "Tables of commands,\nsuch as [server], are checked when the command is installed.",
        examples=EXAMPLES,
        usage="specdec config [options] [MODEL]",
    )
    add_model_argument(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON: values, and the origin of each")
    form.add_argument("--toml", action="store_true", help="print a file that says the same")
    add_config_flags(parser)
    for name, cls in command_tables():
        add_table_flags(parser, cls, name)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print."""
    problems = Problems()
    tables: dict[str, tuple[Any, dict[str, str]]] = {}
    with problems.gathered():
        config, sources = read_config(arguments)
        method, notices = check_plugins(config, sources)
    for name, cls in command_tables():
        with problems.gathered():
            tables[name] = read_table(arguments, cls, name)
    problems.settle()
    left_out = method_defaults(method, config)
    of_commands = [setting for name, (table, at) in tables.items() for setting in describe(table, at, name)]
    sources = {**sources, **{setting.path: setting.origin for setting in of_commands}}
    if arguments.json:
        settings = {**to_dict(config), **nested(of_commands)}
        print(json.dumps({"settings": settings, "sources": sources, "notices": notices}, indent=2, ensure_ascii=False))
    elif arguments.toml:
        print(to_toml(config, sources, {name: table for name, (table, _) in tables.items()}), end="")
    else:
        shown = describe(config, sources)
        place = 1 + max(at for at, setting in enumerate(shown) if setting.path.startswith("speculative"))
        show([*shown[:place], *left_out, *shown[place:], *of_commands])
        for notice in notices:
            print(notice)
    return 0


def command_tables() -> Iterator[tuple[str, type]]:
    """The tables of the installed commands, and the classes of their settings."""
    from specdec.registry import Registry

    registry = Registry()
    for name, command in COMMAND_TABLES.items():
        if any(
            entry.kind == "command" and entry.name == command and entry.status == "ok" for entry in registry.entries()
        ):
            yield name, registry.create("command", command, "config_class")


def nested(settings: list[Setting]) -> dict[str, Any]:
    """Settings of tables as a file would hold them."""
    tables: dict[str, Any] = {}
    for setting in settings:
        table, _, key = setting.path.partition(".")
        tables.setdefault(table, {})[key] = setting.value
    return tables


def check_plugins(config: EngineConfig, sources: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Let the selected plugins check their own options.

    Returns:
        The method's configuration, None without a method; and what method and verifier want to be known (the ``NOTICE``
        of their configuration classes).

    Raises:
        SpecdecError: a plugin is not installed, or refuses an option.
    """
    from specdec.registry import Registry
    from specdec.registry.selection import select_plugins

    method = None if config.speculative is None else config.speculative.method
    with naming_origins(sources):
        selected = select_plugins(config, Registry(config.plugins), method)
    pairs = [("verifier", selected.verifier), ("method", selected.method)]
    notices = [
        f"{kind} {one.name}: {one.options.NOTICE}" for kind, one in pairs if one and hasattr(one.options, "NOTICE")
    ]
    return None if selected.method is None else selected.method.options, notices


def method_defaults(method: Any, config: EngineConfig) -> list[Setting]:
    """The options of the method that nothing sets."""
    from specdec.config import Setting, SpeculativeConfig

    if config.speculative is None or not attrs.has(type(method)):
        return []
    own = {attribute.name for attribute in attrs.fields(SpeculativeConfig)}
    names = [attribute.name for attribute in attrs.fields(type(method)) if attribute.init]
    return [
        Setting(f"speculative.{name}", getattr(method, name), DEFAULT, "option of the method")
        for name in names
        if name not in own and name not in config.speculative.options
    ]


def show(settings: list[Setting]) -> None:
    """A table: setting, value, origin."""
    from rich.table import Table
    from rich.text import Text

    from specdec.cli.console import make_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    for setting in settings:
        style = "dim" if setting.origin == "default" else ""
        table.add_row(setting.path, Text(_shown(setting.value)), Text(setting.origin), style=style)
    make_console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
