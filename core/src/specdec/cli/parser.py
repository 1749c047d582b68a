"""The argument parser of the command line: mistakes become one message with the closest option."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from specdec.cli.vllm_options import ADVICE
from specdec.config.problems import InvalidValueError, closest
from specdec.config.validators import choice
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


_MISSING = "the following arguments are required: "
_NOT_TOGETHER = "not allowed with argument "
_NO_VALUE = "expected "
_IGNORED = "ignored explicit argument "
"""How argparse's messages begin that are put in other words."""

_TYPES: dict[Any, str] = {int: "an integer", float: "a number"}
"""What options of these types take."""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations that raises instead of exiting."""

    takes_settings = True
    """Whether `specdec.config.flags` adds one option for each setting."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", Formatter)
        settings.setdefault("exit_on_error", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` that says where to read more."""
        if message.startswith(_MISSING):
            message = f"{message.removeprefix(_MISSING)} must be given"
        raise UsageError(f"{message}. See: {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the options that exist are known."""
        try:
            parsed, extras = super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            self.error(_in_words(error))
        if extras:
            positions = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
            said = unknown_arguments(extras, self._option_string_actions, positions)
            raise UsageError(f"{said} See: {self.prog} --help")
        return parsed, []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Name numbers as people do, not by their Python types."""
        allowed = _TYPES.get(action.type)
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if allowed is None:
                raise
            raise InvalidValueError(_shown(action), arg_string, allowed) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Give the closest of the names that are allowed."""
        if action.choices is None or value in action.choices:
            return
        names = [str(name) for name in action.choices]
        near = closest(str(value), names)
        if isinstance(action, argparse._SubParsersAction):
            what = str(action.metavar or "command").lower()
            remedy = f"Did you mean {near!r}?" if near else f"There are: {', '.join(names)}."
            raise UsageError(f"unknown {what} {value!r}. {remedy} See: {self.prog} --help")
        hint = f"Did you mean {near!r}?" if near else None
        raise InvalidValueError(_shown(action), value, choice(*names).allowed, hint=hint)


class Listed(Parser):
    """The parser of a subcommand of which only the summary is shown: settings of configurations are left out."""

    takes_settings = False


def _shown(action: argparse.Action) -> str:
    """An argument as the user types it, or as the help calls it."""
    return max(action.option_strings, key=len) if action.option_strings else str(action.metavar or action.dest)


def _in_words(error: argparse.ArgumentError) -> str:
    """One of argparse's complaints, for people."""
    name, message = error.argument_name, error.message
    if name is None:
        return message
    if message.startswith(_NOT_TOGETHER):
        return f"{name} and {message.removeprefix(_NOT_TOGETHER)} exclude each other: give one of them"
    if message.startswith(_NO_VALUE):
        return f"{name} needs {message.removeprefix(_NO_VALUE).replace('argument', 'value')}"
    if message.startswith(_IGNORED):
        return f"{name} takes no value, but has {message.removeprefix(_IGNORED)}"
    return f"{name}: {message}"


def unknown_arguments(extras: list[str], known: Iterable[str], positions: Sequence[str] = ()) -> str:
    """What to say about arguments that no option and no position takes.

    Args:
        extras: the arguments.
        known: the options that exist.
        positions: names of the arguments that are no options.
    """
    wrong = next((extra for extra in extras if extra.startswith("-")), extras[0]).partition("=")[0]
    advice = _advice(wrong)
    if advice:
        return f"there is no option {wrong!r}. {advice}"
    known = tuple(known)
    of_method = _method_with(wrong) if "--set" in known else ""
    if of_method:
        return f"unknown option {wrong!r}. {of_method}"
    if wrong.startswith("--speculative.") and "--set" in known:
        path = wrong[2:].replace("-", "_")
        near = closest(wrong, [option for option in known if option.startswith("--speculative.")], cutoff=0.85)
        hint = f"Did you mean {near}? " if near else ""
        return f"unknown option {wrong!r}. {hint}An option of the method is given as --set {path}=VALUE."
    near = closest(wrong.lstrip("-"), [option.lstrip("-") for option in known if option.startswith("--")])
    hint = f" Did you mean --{near}?" if near else ""
    if wrong.startswith("-"):
        return f"unknown option {wrong!r}.{hint}"
    taken = f" Only {' and '.join(positions)} can be given without an option, all in one place." if positions else ""
    taken += " For several values an option that takes them is repeated: --stop A --stop B."
    return f"unknown argument {wrong!r}.{taken}"


def _advice(option: str) -> str:
    """What to do instead of an option of vLLM, also in its negative form or with its value (``-O3``)."""
    for form in (option, option.replace("--no-", "--", 1), option[:2] if option[2:].isdigit() else option):
        if form in ADVICE:
            return ADVICE[form]
    return ""


def _method_with(option: str) -> str:
    """Which installed methods have an option of this name, with a method's name before it or without; else nothing."""
    from specdec.registry.options import option_names

    typed = option.lstrip("-").removeprefix("speculative.").replace("-", "_")
    pairs = ((method, key) for method, keys in option_names("proposer") for key in keys)
    found = {method: key for method, key in pairs if typed in (key, f"{method}_{key}")}
    if not found:
        return ""
    names = " and ".join(map(repr, found))
    key = next(iter(found.values()))
    return f"It is an option of the method{'s' * (len(found) > 1)} {names}, given as --set speculative.{key}=VALUE."


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
