"""The stat logger ``prometheus``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.metrics import StatLogger
    from specdec.types import EngineContext


@hookimpl
def stat_logger(engine: EngineContext) -> StatLogger:
    """Build the logger whose metrics `specdec_server.metrics.prometheus.EngineCollector` gives."""
    from specdec_server.metrics.prometheus import PrometheusStatLogger

    speculative = engine.settings["speculative"] or {}
    return PrometheusStatLogger(
        model_name=engine.settings["model"],
        proposer=speculative.get("method") or "",
        verifier=engine.settings["verifier"],
        num_speculative_tokens=engine.num_speculative_tokens,
    )
