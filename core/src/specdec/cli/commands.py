"""The built-in subcommands: where each is, and what the list of commands says of it."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A built-in subcommand."""

    module: str
    """Its ``add_parser`` adds it."""
    summary: str


COMMANDS = {
    "generate": Command("specdec.cli.generate", "complete prompts, or answer them with --chat"),
    "chat": Command("specdec.cli.chat", "talk to a model"),
    "bench": Command("specdec.cli.bench", "measure decoding with and without speculation"),
    "doctor": Command("specdec.cli.doctor", "find out whether speculation pays here, and with which method"),
    "config": Command("specdec.cli.config", "show every setting and where its value comes from"),
    "plugins": Command("specdec.cli.plugins", "list, describe and check installed plugins"),
    "new-plugin": Command("specdec.cli.new_plugin", "start a plugin of your own"),
}
