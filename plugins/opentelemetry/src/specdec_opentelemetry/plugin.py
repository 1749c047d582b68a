"""The stat logger ``opentelemetry``. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.metrics import StatLogger
    from specdec.types import EngineContext


@hookimpl
def stat_logger(engine: EngineContext) -> StatLogger:
    """Build the logger."""
    from specdec_opentelemetry.tracing import TracingStatLogger

    return TracingStatLogger(model_name=engine.settings["model"])
