"""What a request's span says, and where spans go."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specdec import LLM, SamplingParams
from specdec.metrics import RequestStats
from specdec.testing import tiny_model
from specdec.testing.oracles import WrongProposer
from specdec.types import SpecStats
from specdec_opentelemetry.tracing import SPAN, TracingStatLogger


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def logger(exporter: InMemorySpanExporter) -> TracingStatLogger:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return TracingStatLogger("demo", provider)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_has_the_times_and_counts_of_its_request(logger, exporter):
    before = time.time_ns()
    logger.record_request(
        RequestStats(
            finish_reason="stop",
            request_id="cmpl-1",
            num_prompt_tokens=7,
            num_output_tokens=5,
            num_cached_tokens=4,
            queued_seconds=1.0,
            first_token_seconds=2.5,
            total_seconds=4.0,
            spec=SpecStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3),
        )
    )
    span = only(exporter)
    assert span.name == SPAN
    assert span.parent is None
    assert before <= span.end_time <= time.time_ns()
    assert span.end_time - span.start_time == 4_000_000_000
    events = [(event.name, (event.timestamp - span.start_time) / 1e9) for event in span.events]
    assert events == [("scheduled", 1.0), ("first token", 2.5)]
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "specdec.cached_tokens": 4,
        "specdec.preemptions": 0,
        "specdec.drafts": 2,
        "specdec.draft_tokens": 6,
        "specdec.accepted_tokens": 3,
        "specdec.mean_acceptance_length": 2.5,
    }
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_request_that_never_ran_has_no_such_times(logger, exporter):
    logger.record_request(RequestStats(finish_reason="abort", total_seconds=0.5))
    assert only(exporter).events == ()


def test_a_failed_request_is_an_error(logger, exporter):
    logger.record_request(RequestStats(finish_reason="error"))
    assert only(exporter).status.status_code is trace.StatusCode.ERROR


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What an OTLP endpoint got."""
    received: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engines_requests_arrive_at_the_endpoint(collector, tmp_path):
    torch.set_num_threads(1)
    model = tiny_model("llama", tmp_path / "model")
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "1MiB", "proposer": WrongProposer(5)}
    with LLM(
        str(model), stat_loggers=("opentelemetry",), speculative_config={"num_speculative_tokens": 2}, **settings
    ) as llm:
        outputs = llm.generate(["the fox", "the dog"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    spans, services = [], set()
    for path, body in collector:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert services == {"specdec"}
    ids = {a.value.string_value for span in spans for a in span.attributes if a.key == "gen_ai.response.id"}
    assert ids == {output.request_id for output in outputs}
    assert [[event.name for event in span.events] for span in spans] == [["scheduled", "first token"]] * 2
