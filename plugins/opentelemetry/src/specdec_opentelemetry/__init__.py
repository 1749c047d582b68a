"""Traces of requests for OpenTelemetry."""

__version__ = "0.1.0"
