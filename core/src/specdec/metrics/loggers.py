"""Consumers of step statistics: the interface, and the logger that writes a line now and then."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.metrics.stats import StatsAccumulator

if TYPE_CHECKING:
    from specdec.metrics.stats import EngineStats, RequestStats, StepStats


class StatLogger(ABC):
    """Receives the statistics of every step, on the engine's thread; so it must be quick and must not raise."""

    def start(self, totals: Callable[[], EngineStats]) -> None:  # noqa: B027 - optional
        """The engine is ready. ``totals`` reads its sums and its present state; it may be called from any thread."""

    @abstractmethod
    def record(self, step: StepStats) -> None:
        """One step is over."""

    def record_request(self, request: RequestStats) -> None:  # noqa: B027 - optional
        """A request has ended, in a step or by an abort; called after the `record` of the step it ended in, or before.

        Requests that were never scheduled are told too.
        """

    def flush(self) -> None:  # noqa: B027 - optional
        """Write what has been gathered so far."""

    def close(self) -> None:
        """The engine stops."""
        self.flush()


class LoggingStatLogger(StatLogger):
    """One line every ``interval`` seconds of activity, to the logger ``specdec.stats`` at level INFO.

    Args:
        interval: seconds between lines.
        logger: where to write, instead of ``specdec.stats``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        interval: float,
        logger: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._logger = logger or logging.getLogger("specdec.stats")
        self._clock = clock
        self._window = StatsAccumulator()
        self._began: float | None = None
        self._last: StepStats | None = None

    def record(self, step: StepStats) -> None:
        """Add a step, and write a line when the interval is over."""
        now = self._clock()
        if self._began is None:
            self._began = now - step.seconds
        self._window.add(step)
        self._last = step
        if now - self._began >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Write a line about the steps since the last one; nothing when there were none."""
        if self._last is None or self._began is None:
            return
        if self._logger.isEnabledFor(logging.INFO):
            elapsed = max(self._clock() - self._began, 1e-9)
            self._logger.info("%s", stats_line(self._window.engine_stats(), self._last, elapsed))
        self._window = StatsAccumulator()
        self._began = self._last = None


def stats_line(window: EngineStats, last: StepStats, elapsed: float) -> str:
    """One line about the steps of a window.

    Args:
        window: their sum.
        last: the last of them, for what is a state and not a sum.
        elapsed: wall seconds of the window.
    """
    parts = [
        f"{window.num_generated_tokens / elapsed:.1f} tokens/s generated",
        f"{window.num_prompt_tokens / elapsed:.1f} tokens/s prompt",
        f"running {last.num_running}",
        f"waiting {last.num_waiting}",
        f"KV cache {last.kv_usage:.1%}",
    ]
    if window.num_cached_tokens:
        parts.append(f"{window.num_cached_tokens} prompt tokens from the prefix cache")
    if window.num_preemptions:
        parts.append(f"{window.num_preemptions} preemptions")
    if window.num_drafts:
        rates = " ".join(f"{rate:.0%}" for rate in window.acceptance_rate_per_pos)
        parts.append(
            f"acceptance length {window.mean_acceptance_length:.2f} "
            f"({window.num_accepted_tokens} of {window.num_draft_tokens} draft tokens; of all drafts {rates} at each "
            "position)"
        )
    return ", ".join(parts)
