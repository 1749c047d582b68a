"""``specdec config``: the effective configuration, and where each value came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli.parser import Subparsers, add_command
from specdec.config import describe, to_dict, to_toml
from specdec.config.flags import add_config_flags, read_config
from specdec.config.load import DEFAULT
from specdec.config.structure import placed
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.config import EngineConfig, Setting

EXAMPLES = """\
  specdec config --model demo:smollm2
      every setting; what is not set anywhere shows its default
  specdec config --config specdec.toml --block-size 32
      a file, with one setting of it overruled
  specdec config --model demo:smollm2 --speculative.method ngram --toml > specdec.toml
      write a file to start from"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "config",
        summary="show every setting and where its value comes from",
        description="Check the configuration and print every setting with its value and origin: the default, a line of "
        "a file, an\nenvironment variable, or an option. Nothing is loaded but the options of the selected method.",
        examples=EXAMPLES,
        usage="specdec config [options]",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON: values, and the origin of each")
    form.add_argument("--toml", action="store_true", help="print a file that says the same")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print."""
    config, sources = read_config(arguments)
    method, notices = check_plugins(config, sources)
    left_out = method_defaults(method, config)
    if arguments.json:
        facts = {"settings": to_dict(config), "sources": sources, "notices": notices}
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    elif arguments.toml:
        print(to_toml(config, sources), end="")
    else:
        settings = describe(config, sources)
        place = 1 + max(at for at, setting in enumerate(settings) if setting.path.startswith("speculative"))
        show([*settings[:place], *left_out, *settings[place:]])
        for notice in notices:
            print(notice)
    return 0


def check_plugins(config: EngineConfig, sources: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Let the selected method and verifier check their own options.

    Returns:
        The method's configuration, None without a method; and what the two plugins want to be known (the ``NOTICE`` of
        their configuration classes).

    Raises:
        SpecdecError: a plugin is not installed, or refuses an option.
    """
    from specdec.registry import Registry

    registry = Registry(config.plugins)
    speculative = config.speculative
    method = None
    try:
        verifier = registry.plugin_config("verifier", config.verifier, config.verifier_options)
        if speculative is not None and speculative.method is not None:
            model = {} if speculative.model is None else {"model": speculative.model}
            method = registry.plugin_config("proposer", speculative.method, {**speculative.options, **model})
    except ConfigError as error:
        raise placed(error, sources) from error
    chosen = [("verifier", config.verifier, verifier), ("method", speculative.method if speculative else None, method)]
    return method, [f"{kind} {name}: {own.NOTICE}" for kind, name, own in chosen if hasattr(own, "NOTICE")]


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
