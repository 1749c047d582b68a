"""The contract of statistics loggers passes the built-in one, and catches every planted fault."""

from __future__ import annotations

import time
from typing import Any

import pytest

from specdec.metrics.loggers import LoggingStatLogger, StatLogger
from specdec.metrics.stats import RequestStats, StepStats
from specdec.testing.contracts import StatLoggerContract


class TestBuiltIn(StatLoggerContract):
    plugin = "specdec.metrics.plugin"
    distribution = "specdec-core"

    @pytest.fixture
    def stat_logger(self) -> StatLogger:
        return LoggingStatLogger(interval=0.5)


class Sound(StatLogger):
    def record(self, step: StepStats) -> None: ...


class DividesByTime(Sound):
    def record(self, step: StepStats) -> None:
        step.num_tokens / step.seconds


class NeedsAFirstToken(Sound):
    def record_request(self, request: RequestStats) -> None:
        round(request.first_token_seconds)  # type: ignore[arg-type]


class FlushesWhatItHasNot(Sound):
    last: Any = None

    def record(self, step: StepStats) -> None:
        self.last = step

    def flush(self) -> None:
        self.last.seconds  # noqa: B018
        self.last = None


class NeedsAStart(Sound):
    def start(self, totals: Any) -> None:
        self.totals = totals

    def close(self) -> None:
        self.totals()


class Sleeps(Sound):
    def record(self, step: StepStats) -> None:
        time.sleep(0.003)


class KeepsSteps(Sound):
    def __init__(self) -> None:
        self.kept: list[StepStats] = []

    def record(self, step: StepStats) -> None:
        self.kept.append(step)


FAULTS = [
    (DividesByTime, "test_steps_of_every_kind"),
    (NeedsAFirstToken, "test_requests_of_every_kind"),
    (FlushesWhatItHasNot, "test_flush_at_any_time"),
    (NeedsAStart, "test_close_without_start"),
    (Sleeps, "test_is_quick"),
    (KeepsSteps, "test_keeps_no_steps"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_are_caught(fault: type[Sound], check: str) -> None:
    with pytest.raises((AssertionError, ArithmeticError, TypeError, AttributeError)):
        getattr(type("Short", (StatLoggerContract,), {"num_steps": 100})(), check)(fault())


@pytest.mark.parametrize("check", sorted({check for _, check in FAULTS}))
def test_a_sound_one_passes(check: str) -> None:
    getattr(StatLoggerContract(), check)(Sound())


def test_every_check_catches_something() -> None:
    checks = {name for name in vars(StatLoggerContract) if name.startswith("test_")}
    assert {check for _, check in FAULTS} == checks
