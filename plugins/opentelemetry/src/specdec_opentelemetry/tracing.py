"""The stat logger ``opentelemetry``: a span for each request that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode

from specdec.metrics import StatLogger
from specdec_opentelemetry import __version__

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from specdec.metrics import RequestStats, StepStats

SPAN = "specdec.request"
_FLUSH_MILLISECONDS = 5000


class TracingStatLogger(StatLogger):
    """Makes a span of each request when it ends, from its times; steps cost nothing.

    Args:
        model_name: the attribute ``gen_ai.request.model``.
        provider: where spans go. None takes the provider that the program has set; without one, spans go in batches,
            from a thread of their own, to the OTLP endpoint that the ``OTEL_`` variables name.
    """

    def __init__(self, model_name: str, provider: trace.TracerProvider | None = None) -> None:
        self._model_name = model_name
        self._own: TracerProvider | None = None
        if provider is None:
            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider):
                provider = self._own = _otlp_provider()
        self._tracer = provider.get_tracer("specdec", __version__)

    def record(self, step: StepStats) -> None:
        """Nothing: a step belongs to many requests."""

    def record_request(self, request: RequestStats) -> None:
        """Make the span of a request; its end is now, its other times follow from what they took."""
        end = time.time_ns()
        start = end - _nanoseconds(request.total_seconds)
        span = self._tracer.start_span(SPAN, Context(), attributes=self._attributes(request), start_time=start)
        for event, seconds in (("scheduled", request.queued_seconds), ("first token", request.first_token_seconds)):
            if seconds is not None:
                span.add_event(event, timestamp=start + _nanoseconds(seconds))
        if request.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def flush(self) -> None:
        """Send what waits, where this logger does the sending."""
        if self._own is not None:
            self._own.force_flush(_FLUSH_MILLISECONDS)

    def close(self) -> None:
        """Send what waits and end the sending thread."""
        if self._own is not None:
            self._own.shutdown()
            self._own = None

    def _attributes(self, request: RequestStats) -> dict[str, AttributeValue]:
        spec = request.spec
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": (request.finish_reason,),
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "specdec.cached_tokens": request.num_cached_tokens,
            "specdec.preemptions": request.num_preemptions,
            "specdec.drafts": spec.num_drafts,
            "specdec.draft_tokens": spec.num_draft_tokens,
            "specdec.accepted_tokens": spec.num_accepted_tokens,
            "specdec.mean_acceptance_length": spec.mean_acceptance_length,
        }


def _otlp_provider() -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say has the last word
    resource = Resource.create({"service.name": "specdec"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
