"""Subcommands that plugins add."""

from __future__ import annotations

import argparse
import logging

import pytest

from specdec.cli.main import join_words
from specdec.errors import PluginImportError
from specdec.registry import Registry

from .conftest import Toys

COMMAND = """
from specdec.hookspecs import hookimpl


@hookimpl
def add_command(cli):
    cli.add_parser("greet").set_defaults(run=lambda arguments: 7)
"""


def _add(toys: Toys, name: str, code: str) -> None:
    toys.add(f"toy-{name}", {"specdec.commands": {name: f"toy_{name}"}}, files={f"toy_{name}.py": code})


def _parse(registry: Registry, name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    if name is None:
        registry.add_commands(subparsers)
    else:
        registry.add_command(name, subparsers)
    return parser


def test_a_plugin_adds_its_command(toys: Toys) -> None:
    _add(toys, "greet", COMMAND)
    assert Registry().command_names() == ("greet",)
    arguments = _parse(Registry(), "greet").parse_args(["greet"])
    assert arguments.run(arguments) == 7


def test_one_command_that_fails_leaves_the_others(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    """Known bug 92: help works whatever is installed."""
    _add(toys, "greet", COMMAND)
    _add(toys, "bad", "raise SystemExit(1)")
    with caplog.at_level(logging.WARNING):
        parser = _parse(Registry(), None)
    assert "greet" in parser.format_help()
    assert "The command 'bad' is left out: The command 'bad' of toy-bad 1.0 is installed but cannot be" in caplog.text
    with pytest.raises(PluginImportError):
        _parse(Registry(), "bad")


def test_a_command_may_have_two_words(toys: Toys) -> None:
    _add(toys, "greet.twice", COMMAND.replace('"greet"', '"greet.twice"'))
    assert join_words(["-v", "greet", "twice", "--now"], "greet") == (["-v", "greet.twice", "--now"], "greet.twice")
    assert join_words(["greet", "once"], "greet") == (["greet", "once"], "greet")
    assert join_words(["greet"], "greet") == (["greet"], "greet")
    assert join_words([], None) == ([], None)
