"""Entry point of ``specdec``. Only the subcommand that was typed is imported."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from specdec.cli.commands import COMMANDS
from specdec.cli.parser import Listed, Parser, UsageError
from specdec.config.problems import closest, with_notes
from specdec.errors import SpecdecError
from specdec.version import __version__
from specdec.wording import reason_of

DESCRIPTION = """\
Run language models with speculative decoding: a cheap proposer guesses several tokens, the model checks them in
one pass, and the output stays the same. Every method is a plugin; `specdec plugins` lists what is installed."""

EXAMPLES = """\
examples:
  specdec generate --model demo:smollm2 --max-tokens 64 "The three laws of robotics are"
      complete a prompt
  specdec generate --model demo:smollm2 --chat --stats --max-tokens 200 \\
          --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}' "Explain binary search."
      answer a question with n-gram speculation, and show how often guesses were right
  specdec chat demo:smollm2 --speculative.method ngram --show-accepted
      talk to a model and see which tokens were guessed
  specdec bench demo:smollm2 --speculative.method ngram
      measure whether speculation pays on your machine
  specdec doctor demo:smollm2
      find out which method and draft length pay, and why
  specdec config --config specdec.toml
      show every setting and where it comes from
  specdec plugins
      list the methods, verifiers and attention backends that are installed

Settings may stand in specdec.toml (or .yaml, .json), in environment variables (SPECDEC_BLOCK_SIZE=32), or on the
command line (--block-size 32); the later wins."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        The exit code: 0; 1 when a command says so, or when the disk is full; 2 for a mistake of the user, told in one
        message; 130 after Ctrl-C; 141 when the reader of the output went away.
    """
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # here a failure can still be told
        return code
    except SpecdecError as error:
        print(f"error: {with_notes(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # its reader went away
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: nothing can be written any more: {reason_of(error)}", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    """Keep Python from complaining when it writes the rest of standard output at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(argv: list[str]) -> int:
    """Parse and run; mistakes are raised."""
    command = typed_command(argv)
    argv, command = join_words(argv, command)
    parser = build_list() if command is None else build_parser(command)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    configure_logging(arguments.verbose)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        code = arguments.run(arguments)
    except SpecdecError:
        from specdec.config.flags import origins_read
        from specdec.config.structure import naming_origins

        with naming_origins(origins_read(arguments)):
            raise
    return int(code or 0)


def typed_command(argv: Sequence[str]) -> str | None:
    """The first word that is no option; None when help is asked for before it."""
    first = next((word for word in argv if not word.startswith("-") or word in ("-h", "--help")), None)
    return None if first is None or first.startswith("-") else first


def join_words(argv: list[str], command: str | None) -> tuple[list[str], str | None]:
    """``bench serve`` -> ``bench.serve`` where a plugin has a command of that name: a command may have two words."""
    if command is None:
        return argv, command
    position = argv.index(command)
    following = argv[position + 1] if len(argv) > position + 1 else ""
    joined = f"{command}.{following}"
    # most second words are options, prompts and paths: for those nothing need be looked up
    if not following.isidentifier() or joined not in _two_word_commands():
        return argv, command
    return [*argv[:position], joined, *argv[position + 2 :]], joined


def _two_word_commands() -> set[str]:
    from specdec.registry import Registry
    from specdec.registry.catalogue import DISTRIBUTIONS

    names = {*Registry().command_names(), *DISTRIBUTIONS["command"]}
    return {name for name in names if "." in name}


def build_parser(command: str | None) -> Parser:
    """The parser with the one subcommand that was typed, or with all of them when none was.

    Raises:
        UsageError: there is no such command.
    """
    parser, commands = _without_commands(Parser)
    if command is None:
        add_all(commands)
    elif command in COMMANDS:
        importlib.import_module(COMMANDS[command].module).add_parser(commands)
    else:
        add_from_plugin(commands, command)
    return parser


def build_list() -> Parser:
    """The parser for ``specdec --help``: every subcommand has its line there, and no arguments."""
    from specdec.registry import Registry

    parser, commands = _without_commands(Listed)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    Registry().add_commands(commands)
    return parser


def _without_commands(parser_class: type[Parser]) -> tuple[Parser, argparse._SubParsersAction[Any]]:
    """The parser of ``specdec`` itself, and what subcommands are added to."""
    parser = Parser(prog="specdec", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does (before the command)")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=parser_class)
    return parser, commands


def add_all(commands: argparse._SubParsersAction[Any]) -> None:
    """Add every subcommand, those of plugins too."""
    from specdec.registry import Registry

    for command in COMMANDS.values():
        importlib.import_module(command.module).add_parser(commands)
    Registry().add_commands(commands)


def add_from_plugin(commands: argparse._SubParsersAction[Any], command: str) -> None:
    """Add a subcommand that an installed plugin offers.

    Raises:
        UsageError: none offers it.
        PluginError: the one that does cannot be used.
    """
    from specdec.registry import Registry

    registry = Registry()
    installed = registry.command_names()
    if command in installed:
        registry.add_command(command, commands)
        return
    known = [*COMMANDS, *(name.replace(".", " ") for name in installed)]
    near = closest(command, known)
    hint = f"Did you mean {near!r}?" if near else f"Commands: {', '.join(known)}."
    raise UsageError(f"unknown command {command!r}. {hint}{_installable(command)} See: specdec --help")


def _installable(command: str) -> str:
    from specdec.registry.catalogue import DISTRIBUTIONS

    distribution = DISTRIBUTIONS.get("command", {}).get(command)
    return f" It comes with another package: pip install {distribution}." if distribution else ""


def configure_logging(verbose: bool) -> None:
    """Warnings always, information with ``--verbose``, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("specdec")
    if not logger.handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
