"""Statistics of steps, requests and engines, and what consumes them."""

from specdec.metrics.loggers import LoggingStatLogger, StatLogger
from specdec.metrics.stats import EngineStats, RequestStats, SpecCounter, SpecDecodingStats, StatsAccumulator, StepStats

__all__ = [
    "EngineStats",
    "LoggingStatLogger",
    "RequestStats",
    "SpecCounter",
    "SpecDecodingStats",
    "StatLogger",
    "StatsAccumulator",
    "StepStats",
]
