"""Writes docs/reference/command-line.md from the parsers of `specdec`; with --check, fails when it is out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from pages import code, head, members, prose, table, write_or_check

from specdec.cli.commands import COMMANDS
from specdec.cli.main import build_parser
from specdec.registry import Registry

LEAD = """\
Every command with its options, from the parsers themselves; `specdec COMMAND --help` prints the same. Commands that a
plugin brings say so. Options that set something of the [configuration](configuration.md) are the same for all
commands and stand once, at the [end](#configuration-options).

The model is `MODEL`, or `--model MODEL`, which is the same. Commands with other arguments, `generate` and `train`, take
it as `--model` alone. `--prompts` is a file of prompts, `--output-json` a file for the numbers that were measured.

Exit codes: 0; 1 when a command says so (a check that failed); 2 for a mistake, told in one message on the standard
error; 130 after Ctrl-C.
"""

CONFIGURATION = "configuration"
"""Title of the group of options that every command with an engine has."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command of the workspace's packages, by what a user types."""
    found = {"specdec": build_parser(None)}
    foreign = {e.name for e in Registry().entries() if e.kind == "command" and e.distribution not in members()}
    for name, parser in _children(found["specdec"]):
        if name not in foreign:
            found[name] = parser
            found |= {f"{name} {action}": nested for action, nested in _children(parser)}
    return {name.replace(".", " "): parser for name, parser in found.items()}


def _children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def page() -> str:
    """The whole page."""
    found = parsers()
    brought = {e.name.replace(".", " "): e.distribution for e in Registry().entries() if e.kind == "command" and e.name}
    summaries = _summaries(found["specdec"])
    shared = next(group for group in _groups(found["generate"]) if group.title == CONFIGURATION)
    generating = {option for group in _groups(found["generate"]) for option in action_names(group)}
    names = [name for name in found if name != "specdec"]
    commands = [
        (
            f"[`{name}`](#{_anchor(name)})",
            prose(summaries.get(name, found[name].description or "")),
            _origin(name, brought),
        )
        for name in names
        if name in summaries
    ]
    return "\n".join(
        [
            head("gen_cli_docs.py", "the argument parsers", "Command line", LEAD),
            table(("command", "does", "package"), commands),
            *_command("specdec", found["specdec"], "Before the command", set()),
            *(part for name in names for part in _command(name, found[name], f"`specdec {name}`", generating)),
            "## Configuration options\n",
            table(("option", "meaning"), map(_option, shared._group_actions)),
        ]
    )


def _origin(name: str, brought: dict[str, str]) -> str:
    return code("specdec-core" if name in COMMANDS else brought[name])


def _summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    texts = {choice.dest.replace(".", " "): (choice.help or "") for choice in action._choices_actions}
    return {name: text.partition(" (typed as")[0] for name, text in texts.items()}


def _anchor(name: str) -> str:
    return f"specdec-{name.replace(' ', '-')}"


def _groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    return [group for group in parser._action_groups if group._group_actions]


def action_names(group: argparse._ArgumentGroup) -> set[str]:
    """The options of a group."""
    return {option for action in group._group_actions for option in action.option_strings}


def _command(name: str, parser: argparse.ArgumentParser, title: str, shared: set[str]) -> Iterator[str]:
    level = "###" if " " in name and name.partition(" ")[0] in COMMANDS and not name.startswith("bench") else "##"
    yield f"{level} {title}\n"
    if name != "specdec":
        yield _description(parser.description or "")
    for group in _groups(parser):
        actions = [
            a for a in group._group_actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if group.title == CONFIGURATION:
            yield "And the [configuration options](#configuration-options).\n"
        elif name != "generate" and group.title != "options" and action_names(group) and action_names(group) <= shared:
            yield f"And the options of [`generate`](#{_anchor('generate')}) under *{group.title}*.\n"
        elif actions:
            yield table((_heading(group.title or "options"), "meaning"), map(_option, actions))
    if name != "specdec" and parser.epilog:
        yield _examples(parser.epilog)


def _heading(title: str) -> str:
    return {"positional arguments": "argument"}.get(title, title)


def _description(text: str) -> str:
    """Paragraphs as they are; blocks of aligned columns as code."""
    blocks = []
    for block in text.strip().split("\n\n"):
        aligned = any("   " in line.strip() for line in block.splitlines())
        blocks.append(f"```text\n{block}\n```" if aligned else prose(block))
    return "\n\n".join(blocks) + "\n"


def _examples(epilog: str) -> str:
    """The examples as a script: each explanation, which the help shows below its command, as a comment above it."""
    lines = [line for line in epilog.splitlines() if line.strip() not in ("", "examples:")]
    script: list[str] = []
    command: list[str] = []
    for line in lines:
        continues = bool(command) and command[-1].endswith("\\")
        if line.startswith("      ") and not continues:
            script += [f"# {line.strip()}", *command]
            command = []
        else:
            command.append(line.removeprefix("  "))
    return "```text\n" + "\n".join([*script, *command]) + "\n```\n"


def _option(action: argparse.Action) -> tuple[str, str]:
    words = [*action.option_strings] or [str(action.metavar or action.dest)]
    value = _value(action) if action.option_strings else ""
    return ", ".join(code(f"{word}{value}") for word in words), prose(_help(action))


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return " {" + ",".join(map(str, action.choices)) + "}"
    metavar: Any = action.metavar or action.dest.upper()
    return f" {metavar}"


def _help(action: argparse.Action) -> str:
    values = {**vars(action), "prog": "specdec"}
    text = (action.help or "") % values
    if action.choices is not None and not action.option_strings:
        text = f"{text}: {', '.join(map(str, action.choices))}"
    return text


if __name__ == "__main__":
    sys.exit(write_or_check("command-line.md", "the command line", page))
