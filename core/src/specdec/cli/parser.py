"""The argument parser of the command line: mistakes become one message with the closest option."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from typing import Any, NoReturn

from specdec.cli.vllm_options import ADVICE
from specdec.config.problems import closest
from specdec.errors import SpecdecError

Subparsers = argparse._SubParsersAction
"""What `add_parser` functions get: call ``add_parser`` on it."""


class UsageError(SpecdecError):
    """The command line itself is wrong."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 110 columns, with the descriptions' own line breaks."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110)
        super().__init__(prog, max_help_position=34, width=width)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that raises instead of exiting."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", Formatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` that says where to read more."""
        raise UsageError(f"{message}. See: {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the options that exist are known."""
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:
            raise UsageError(f"{unknown_arguments(extras, self._option_string_actions)} See: {self.prog} --help")
        return parsed, []


def unknown_arguments(extras: list[str], known: Iterable[str]) -> str:
    """What to say about arguments that no option and no position takes."""
    wrong = next((extra for extra in extras if extra.startswith("-")), extras[0]).partition("=")[0]
    if wrong in ADVICE:
        return f"there is no option {wrong!r}. {ADVICE[wrong]}"
    if wrong.startswith("--speculative.") and "--set" in (known := tuple(known)):
        path = wrong[2:].replace("-", "_")
        near = closest(wrong, [option for option in known if option.startswith("--speculative.")], cutoff=0.85)
        hint = f"Did you mean {near}? " if near else ""
        return f"unknown option {wrong!r}. {hint}An option of the method is given as --set {path}=VALUE."
    near = closest(wrong.lstrip("-"), [option.lstrip("-") for option in known if option.startswith("--")])
    hint = f" Did you mean --{near}?" if near and wrong.startswith("-") else ""
    kind = "option" if wrong.startswith("-") else "argument"
    return f"unknown {kind} {wrong!r}.{hint}"


def add_model(parser: argparse.ArgumentParser, default: str | None, help_text: str) -> None:
    """Let a command without an engine's configuration take its model as other commands do: ``MODEL`` or ``--model``.

    Args:
        parser: the command's parser; the name stands in the attribute ``model`` of what it parses.
        default: the model when none is given; None when one must be.
        help_text: what is said of it.
    """
    parser.add_argument("--model", action=_ModelAction, default=default, metavar="MODEL", help=help_text)
    parser.add_argument(
        "model",
        nargs="?",
        action=_ModelAction,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the same as --model",
    )


class _ModelAction(argparse.Action):
    """Take the model once, whichever way it is given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, "model_given", values)
        if before != values:
            raise UsageError(f"model is given twice: {before!r} and {values!r}.")
        namespace.model = namespace.model_given = values


def add_command(
    commands: Subparsers[Any],
    name: str,
    *,
    summary: str,
    description: str,
    examples: str = "",
    usage: str | None = None,
) -> Parser:
    """Add a subcommand's parser.

    Args:
        commands: the object that ``add_subparsers`` returned.
        name: what the user types; a point stands between the words of a command of two, such as ``bench.serve``.
        summary: one line for the list of commands.
        description: what it does.
        examples: command lines with a line of explanation each, shown at the end of the help.
        usage: the first line of the help, for commands with too many options to list there.
    """
    epilog = f"examples:\n{examples.rstrip()}" if examples else None
    typed = name.replace(".", " ")
    parser: Parser = commands.add_parser(
        name,
        prog=f"{commands._prog_prefix} {typed}",
        help=summary,
        description=description,
        epilog=epilog,
        usage=usage,
    )
    commands._get_subactions()[-1].metavar = typed
    return parser
