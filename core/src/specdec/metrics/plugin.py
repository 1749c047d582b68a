"""The built-in statistics logger `logging` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.metrics.loggers import StatLogger
    from specdec.types import EngineContext


@hookimpl
def stat_logger(engine: EngineContext) -> StatLogger:
    """Build the logger that writes to Python's logging, as often as ``log_stats_interval`` says."""
    from specdec.metrics.loggers import LoggingStatLogger

    return LoggingStatLogger(engine.settings["log_stats_interval"])
