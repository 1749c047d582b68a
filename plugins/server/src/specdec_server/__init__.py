"""OpenAI-compatible HTTP server for specdec."""

__version__ = "0.1.0"
