"""Streamed text with accepted draft tokens marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from specdec.cli.console import harmless

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.outputs import CompletionOutput
    from specdec.sampling.detokenizer import IncrementalDetokenizer

COLOURS = ("green", "cyan", "blue", "magenta", "yellow")
"""Of draft positions 0, 1, …; later positions share the last one."""


def legend() -> Text:
    """Which colour means which draft position."""
    text = Text("accepted draft tokens, by draft position: ")
    for position, colour in enumerate(COLOURS):
        last = "+" if position == len(COLOURS) - 1 else ""
        text.append(f"{position}{last}", style=f"underline {colour}")
        text.append(" ")
    return text


class MarkedStream:
    """Prints one growing output, piece by piece.

    With a detokenizer, text from accepted draft tokens is underlined and coloured by draft position; without a terminal
    that can do so it stands in [brackets].

    Args:
        console: where to print.
        detokenizer: decodes the tokens once more, one at a time, to tell whose text is whose; None for no marks.
    """

    def __init__(self, console: Console, detokenizer: IncrementalDetokenizer | None) -> None:
        self._console = console
        self._printed = 0
        self._spans = None if detokenizer is None else _Spans(detokenizer)
        self._coloured = console.is_terminal and not console.no_color

    def update(self, choice: CompletionOutput) -> None:
        """Print what is new in the output."""
        if self._spans is None:
            self._write(choice.text[self._printed :], -1)
        else:
            self._spans.extend(choice)
            for piece, origin in self._spans.pieces(choice.text, self._printed):
                self._write(piece, origin)
        self._printed = len(choice.text)

    def _write(self, piece: str, origin: int) -> None:
        if not piece:
            return
        accepted = origin >= 0
        if self._console.is_terminal:
            piece = harmless(piece)
        if accepted and self._coloured:
            piece = Style(underline=True, color=COLOURS[min(origin, len(COLOURS) - 1)]).render(piece)
        elif accepted:
            piece = f"[{piece}]"
        self._console.file.write(piece)
        self._console.file.flush()


class _Spans:
    """Which part of the text each token made."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._ends: list[tuple[int, int]] = []
        """(end in the text, origin) of each token that completed some text."""
        self._length = 0

    def extend(self, choice: CompletionOutput) -> None:
        """Take in the tokens that are new in the output."""
        for token_id, origin in zip(
            choice.token_ids[self._num_tokens :], choice.token_origins[self._num_tokens :], strict=False
        ):
            self._num_tokens += 1
            text = self._detokenizer.append([token_id])
            if text:
                self._length += len(text)
                self._ends.append((self._length, origin))

    def pieces(self, text: str, start: int) -> list[tuple[str, int]]:
        """``text[start:]`` cut at the borders of tokens, with each piece's origin; -1 for what no token owns yet."""
        found = []
        for end, origin in self._ends:
            if end > start:
                found.append((text[start:end], origin))
                start = end
            if start >= len(text):
                break
        else:
            found.append((text[start:], -1))
        return found
