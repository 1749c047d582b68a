"""`specdec plugins`: what is installed, what one plugin is, and whether it keeps its contract.

Listing and describing read metadata and sources; torch is imported by `check` alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.cli.commands import COMMANDS
from specdec.cli.parser import add_command
from specdec.errors import PluginError, PluginNotFoundError, SpecdecError
from specdec.registry import PluginEntry, Registry
from specdec.registry.catalogue import DISTRIBUTIONS, KINDS
from specdec.registry.machine import obstacle
from specdec.registry.messages import did_you_mean
from specdec.registry.policy import core_requirement
from specdec.wording import shown

if TYPE_CHECKING:
    from specdec.config import PluginsConfig

EXAMPLES = """\
  specdec plugins
      all plugins, and why one cannot be used
  specdec plugins info ngram
      one plugin, with its options
  specdec plugins check ngram
      run the contract tests against it"""

_STYLES = {"ok": "green", "blocked": "yellow", "missing dependency": "yellow", "not on this machine": "yellow"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``plugins`` to the command line."""
    parser = add_command(
        subparsers,
        "plugins",
        summary=COMMANDS["plugins"].summary,
        description="List the installed plugins, or describe or check one of them. Listing imports none.",
        examples=EXAMPLES,
    )
    parser.set_defaults(json=False, config=None)
    parser.set_defaults(load=False, run=run_list)
    _add_list_options(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    listing = actions.add_parser(
        "list", help="list the installed plugins, as without an action", description="Lists the installed plugins."
    )
    _add_list_options(listing)

    info = actions.add_parser("info", help="describe one plugin", description="Describes one plugin and its options.")
    info.add_argument("name", metavar="NAME", help="name of a plugin, or of a distribution")
    _add_common(info)
    info.set_defaults(run=run_info)

    check = actions.add_parser(
        "check",
        help="run the contract tests against one plugin",
        description="Runs the contract tests of specdec.testing against an installed plugin.",
    )
    check.add_argument("name", metavar="NAME", help="name of a plugin")
    check.add_argument("--kind", choices=KINDS, help="its kind, when plugins of several kinds have the name")
    check.add_argument(
        "--options", type=_json_table, default={}, metavar="JSON", help='its options, for example \'{"model": "..."}\''
    )
    _add_common(check)
    check.set_defaults(run=run_check)


def _add_list_options(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--load",
        action="store_true",
        default=argparse.SUPPRESS,
        help="also import each plugin; exit with 1 when one cannot be imported",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    # suppressed defaults: an action's parser must not undo what was given before the action
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="configuration whose [plugins] section applies"
    )


def _json_table(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


# --- list ---------------------------------------------------------------------------------------


def run_list(arguments: argparse.Namespace) -> int:
    """Print all plugins; returns the exit code."""
    registry = _registry(arguments)
    entries = tuple(_on_this_machine(entry) for entry in registry.entries())
    if arguments.load:
        entries = tuple(_after_loading(registry, entry) for entry in entries)
    if arguments.json:
        _print_json([_as_dict(registry, entry) for entry in entries])
    else:
        _print_table(registry, entries)
    return 1 if arguments.load and any(entry.status == "broken" for entry in entries) else 0


def _on_this_machine(entry: PluginEntry) -> PluginEntry:
    """The entry, marked when its distribution says that the machine lacks something."""
    lacks = obstacle(entry.found.module, entry.name) if entry.status == "ok" and entry.name else ""
    return attrs.evolve(entry, status="not on this machine", detail=lacks) if lacks else entry


def _after_loading(registry: Registry, entry: PluginEntry) -> PluginEntry:
    """The entry, marked as broken when importing it fails."""
    if (
        entry.status not in ("ok", "missing dependency", "not on this machine")
        or entry.kind is None
        or entry.name is None
    ):
        return entry
    try:
        registry.load(entry.kind, entry.name)
    except PluginError as error:
        return attrs.evolve(entry, status="broken", detail=str(error))
    return entry


def _print_table(registry: Registry, entries: tuple[PluginEntry, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from specdec.cli.console import make_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "name", "distribution", "version", "hooks", "status"):
        table.add_column(column, no_wrap=column != "hooks", overflow="fold")
    for entry in entries:
        kind = KINDS[entry.kind].label if entry.kind else "-"
        cells = (kind, entry.name or "-", entry.distribution, entry.version, ", ".join(registry.hooks(entry)))
        table.add_row(*map(Text, cells), Text(entry.status, style=_STYLES.get(entry.status, "red")))
    console = make_console()
    console.width = max(console.width, 110)  # names stay whole; a narrower terminal wraps the lines itself
    console.print(table)
    for entry in entries:
        if entry.detail:
            what = f"{entry.name} of {entry.distribution}" if entry.name else entry.distribution
            console.print(f"\n{what}, {entry.status}: {entry.detail}", markup=False, soft_wrap=True)


# --- info ---------------------------------------------------------------------------------------


def run_info(arguments: argparse.Namespace) -> int:
    """Print what is known about one name; returns the exit code."""
    registry = _registry(arguments)
    described = [_described(registry, _on_this_machine(entry)) for entry in _named(registry, arguments.name)]
    if arguments.json:
        _print_json(described)
        return 0
    from specdec.cli.console import make_console

    console = make_console()
    for facts in described:
        options = facts.pop("options", [])
        width = max(map(len, facts))
        for key, value in facts.items():
            if value in ("", []):
                continue
            text = ", ".join(value) if isinstance(value, list | tuple) else value
            console.print(f"{key.replace('_', ' '):{width}}  {text}", markup=False)
        if options:
            console.print("options")
        for option in options:
            console.print(f"  {_option_line(option)}", markup=False)
        console.print()
    return 0


def _described(registry: Registry, entry: PluginEntry) -> dict[str, Any]:
    facts = _as_dict(registry, entry)
    facts["entry_point"] = entry.found.value
    required = core_requirement(entry.found)
    facts["requires_core"] = str(required.specifier) if required else "any version"
    if entry.kind and entry.name and KINDS[entry.kind].options and entry.status in ("ok", "not on this machine"):
        try:
            facts["options"] = _options(registry, entry.kind, entry.name)
        except PluginError as error:
            facts["problem"] = str(error)
    return facts


def _options(registry: Registry, kind: str, name: str) -> list[dict[str, Any]]:
    """The fields of the plugin's configuration class, which the contract lets us import cheaply."""
    from specdec.config.introspect import leaves

    plugin = registry.load(kind, name)
    if not plugin.implements("config_class"):
        return []
    section = KINDS[kind].section(name)
    return [
        {
            "name": f"{section}.{leaf.path}",
            "default": None if leaf.attribute.default is attrs.NOTHING else _plain(leaf.attribute.default),
            "required": leaf.attribute.default is attrs.NOTHING,
            "doc": leaf.doc,
        }
        for leaf in leaves(plugin.build("config_class"))
    ]


def _option_line(option: dict[str, Any]) -> str:
    """An option as the configuration shows it: name, what holds when it is not given, meaning."""
    if option["required"]:
        value = "(required)"
    elif option["default"] is None:
        value = "(not set)"
    else:
        value = f"= {shown(option['default'])}"
    return f"{option['name']} {value}  {option['doc']}"


def _plain(default: Any) -> Any:
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # Factory is typed as a function
        return None if default.takes_self else default.factory()
    return default


# --- check --------------------------------------------------------------------------------------


def run_check(arguments: argparse.Namespace) -> int:
    """Run the contract tests against one plugin; returns 0 when all pass, 1 otherwise."""
    try:
        from specdec.cli.plugin_check import check
    except ImportError as error:
        raise SpecdecError(
            f"The contract tests need more packages ({error}): pip install 'specdec-core[test]'"
        ) from error
    registry = _registry(arguments)
    entries = [entry for entry in _named(registry, arguments.name) if arguments.kind in (None, entry.kind)]
    kinds = sorted({entry.kind for entry in entries if entry.kind})
    if len(kinds) != 1:
        raise PluginNotFoundError(
            f"Plugins of {len(kinds)} kinds are called {arguments.name!r}: {', '.join(kinds) or 'none'}. "
            "Say which is meant with --kind.",
            name=arguments.name,
        )
    report = check(registry, kinds[0], arguments.name, arguments.options)
    if arguments.json:
        _print_json(report.as_dict())
    else:
        report.print()
    return 0 if report.passed else 1


# --- shared -------------------------------------------------------------------------------------


def _registry(arguments: argparse.Namespace) -> Registry:
    return Registry(_plugins_section(arguments.config))


def _plugins_section(named: str | None) -> PluginsConfig | None:
    """The ``[plugins]`` section of the configuration file that an engine started here would read."""
    from specdec.config import PluginsConfig, structure
    from specdec.config.files import find, read
    from specdec.config.load import CONFIG_VARIABLE

    named = named or os.environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else find(Path())
    if path is None:
        return None
    values, origins = read(path)
    return structure(PluginsConfig, values.get("plugins", {}), PluginsConfig.SECTION, origins)


def _named(registry: Registry, name: str) -> list[PluginEntry]:
    """The entries that a plugin's or a distribution's name means.

    Raises:
        PluginNotFoundError: none.
    """
    entries = registry.entries()
    found = [entry for entry in entries if entry.name == name]
    found = found or [entry for entry in entries if entry.distribution == name]
    if found:
        return found
    known = {plugin: distribution for names in DISTRIBUTIONS.values() for plugin, distribution in names.items()}
    installed = sorted({entry.name for entry in entries if entry.name})
    close = difflib.get_close_matches(name, [*installed, *known], n=1)
    if name in known:
        remedy = f"It comes with pip install {known[name]}."
    else:
        suggestion = close[0] if close else None
        install = known.get(close[0]) if close and close[0] not in installed else None
        remedy = did_you_mean(suggestion, install).strip() or "The list: specdec plugins"
    raise PluginNotFoundError(
        f"No plugin named {name!r} is installed. {remedy}",
        name=name,
        install=known.get(name),
        installed=installed,
    )


def _as_dict(registry: Registry, entry: PluginEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "hooks": list(registry.hooks(entry)),
        "status": entry.status,
        "detail": entry.detail,
    }


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    print()
