"""Consoles of commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def harmless(text: str) -> str:
    """Text for a terminal: control characters, which a terminal would obey, become visible signs."""
    return text.translate(_VISIBLE)


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours no numbers, and breaks no lines when its output goes to a file or a pipe."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console
