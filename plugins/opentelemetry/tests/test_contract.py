"""The logger keeps the contract of its interface."""

import pytest
from opentelemetry.sdk.trace import TracerProvider

from specdec.metrics import StatLogger
from specdec.testing.contracts import StatLoggerContract
from specdec_opentelemetry.tracing import TracingStatLogger


class TestTracing(StatLoggerContract):
    plugin = "specdec_opentelemetry.plugin"
    distribution = "specdec-opentelemetry"

    @pytest.fixture
    def stat_logger(self) -> StatLogger:
        return TracingStatLogger("model", TracerProvider())
