"""Statistics of steps, requests and engines, and what consumes them."""

from specdec.metrics.loggers import LoggingStatLogger, StatLogger
from specdec.metrics.stats import EngineStats, SpecCounter, SpecDecodingStats, StatsAccumulator, StepStats

__all__ = [
    "EngineStats",
    "LoggingStatLogger",
    "SpecCounter",
    "SpecDecodingStats",
    "StatLogger",
    "StatsAccumulator",
    "StepStats",
]
