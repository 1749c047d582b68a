"""The contract of `specdec.metrics.StatLogger`."""

from __future__ import annotations

import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from specdec.metrics.stats import EngineStats, RequestStats, StepStats
from specdec.testing.contracts.base import PluginContract
from specdec.types import SpecStats

if TYPE_CHECKING:
    from specdec.metrics.loggers import StatLogger


class StatLoggerContract(PluginContract):
    """What every statistics logger must hold to. A subclass gives the fixture `stat_logger`, a new logger."""

    num_steps: ClassVar[int] = 300
    """Steps of the tests of speed and memory."""
    most_seconds_per_step: ClassVar[float] = 0.002
    """A logger runs between the steps of the engine, so what it takes is lost."""
    most_bytes_per_step: ClassVar[int] = 48

    @pytest.fixture
    def stat_logger(self) -> StatLogger:
        """The logger to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'stat_logger'")

    # --- what a logger is told --------------------------------------------------------------------

    def steps(self) -> list[StepStats]:
        """Steps of every kind: idle, prefill, decode, speculation, preemption."""
        times: dict[str, Any] = {
            "propose_seconds": 1e-4,
            "target_seconds": 0.02,
            "verify_seconds": 1e-3,
            "rest_seconds": 2e-4,
        }
        return [
            StepStats(),
            StepStats(
                num_requests=2, num_tokens=90, num_prompt_tokens=90, num_cached_tokens=16, num_waiting=3, **times
            ),
            StepStats(num_requests=2, num_tokens=2, num_generated_tokens=2, first_token_seconds=(0.2, 0.3), **times),
            self.speculative_step(),
            StepStats(num_requests=1, num_preemptions=1, speculation_paused=True, kv_usage=1.0, **times),
        ]

    def speculative_step(self) -> StepStats:
        """A step that verified drafts."""
        return StepStats(
            num_requests=3,
            num_tokens=11,
            num_generated_tokens=7,
            num_drafts=2,
            num_draft_tokens_per_pos=(2, 2, 2, 2),
            num_accepted_tokens_per_pos=(2, 1, 1, 0),
            target_seconds=0.03,
            num_running=3,
            kv_usage=0.5,
            inter_token_seconds=(0.03, 0.03, 0.04),
            current_draft_tokens=4,
        )

    def requests(self) -> list[RequestStats]:
        """Requests that ended in every way, one of them before it was scheduled."""
        spec = SpecStats(num_drafts=3, num_draft_tokens=12, num_accepted_tokens=5, num_accepted_tokens_per_pos=(3, 2))
        times: dict[str, Any] = {"queued_seconds": 0.01, "first_token_seconds": 0.2, "total_seconds": 1.5}
        return [
            RequestStats(finish_reason="stop", num_prompt_tokens=9, num_output_tokens=20, spec=spec, **times),
            RequestStats(finish_reason="length", num_prompt_tokens=9, num_output_tokens=1, **times),
            RequestStats(finish_reason="error", num_prompt_tokens=3, queued_seconds=0.5, total_seconds=0.5),
            RequestStats(finish_reason="abort"),
        ]

    def begin(self, stat_logger: StatLogger) -> None:
        """The engine is ready."""
        stat_logger.start(lambda: EngineStats(num_steps=3, total_blocks=8, free_blocks=5))

    # --- checks -----------------------------------------------------------------------------------

    def test_steps_of_every_kind(self, stat_logger: StatLogger) -> None:
        """No step makes it raise, an idle one and one that took no time included."""
        self.begin(stat_logger)
        for step in [*self.steps(), *reversed(self.steps())]:
            stat_logger.record(step)
        stat_logger.close()

    def test_requests_of_every_kind(self, stat_logger: StatLogger) -> None:
        """No end of a request makes it raise, whether told before the step it ended in or after."""
        self.begin(stat_logger)
        for request in self.requests():
            stat_logger.record_request(request)
        stat_logger.record(self.speculative_step())
        for request in self.requests():
            stat_logger.record_request(request)
        stat_logger.close()

    def test_flush_at_any_time(self, stat_logger: StatLogger) -> None:
        """What has been gathered may be asked for before anything was, and twice."""
        self.begin(stat_logger)
        stat_logger.flush()
        stat_logger.record(self.speculative_step())
        stat_logger.flush()
        stat_logger.flush()
        stat_logger.close()

    def test_close_without_start(self, stat_logger: StatLogger) -> None:
        """An engine that fails while it starts closes its loggers too."""
        stat_logger.close()

    def test_is_quick(self, stat_logger: StatLogger) -> None:
        """A step costs little, because the engine waits."""
        self.begin(stat_logger)
        self._record(stat_logger, 20)
        best = min(self._record(stat_logger, self.num_steps // 5) for _ in range(5)) / (self.num_steps // 5)
        stat_logger.close()
        assert best <= self.most_seconds_per_step, f"record() takes {1e6 * best:.0f} µs"

    def test_keeps_no_steps(self, stat_logger: StatLogger) -> None:
        """Memory does not grow with the number of steps, once what was gathered has been written."""
        self.begin(stat_logger)
        tracemalloc.start()
        try:
            sizes = []
            for _ in range(2):
                self._record(stat_logger, self.num_steps)
                stat_logger.flush()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        stat_logger.close()
        grown = (sizes[1] - sizes[0]) / self.num_steps
        assert grown <= self.most_bytes_per_step, f"{grown:.0f} bytes stay for every step"

    def _record(self, stat_logger: StatLogger, count: int) -> float:
        """Seconds for ``count`` steps and as many ended requests."""
        request = self.requests()[0]
        steps = [self.speculative_step() for _ in range(count)]
        began = time.perf_counter()
        for step in steps:
            stat_logger.record(step)
            stat_logger.record_request(request)
        return time.perf_counter() - began
