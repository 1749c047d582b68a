"""Consoles of commands."""

from __future__ import annotations

from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """A console that colours no numbers, and breaks no lines when its output goes to a file or a pipe."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console
