"""The progress bar of a batch of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class GenerationProgress:
    """Counts finished requests and shows tokens per second; shows nothing when ``show`` is False."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._total = total
        self._show = show
        self._tokens = 0
        self._bar: Progress | None = None

    def __enter__(self) -> GenerationProgress:
        if self._show:
            self._bar = _bar()
            self._bar.add_task("", total=self._total, rate=0.0)
            self._bar.start()
        return self

    def advance(self, num_tokens: int) -> None:
        """One more request is done, with this many tokens."""
        self._tokens += num_tokens
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, advance=1, rate=self._tokens / task.elapsed if task.elapsed else 0.0)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>8.1f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
