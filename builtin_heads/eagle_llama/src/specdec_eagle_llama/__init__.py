"""EAGLE and EAGLE-3 heads with Llama-like layers."""

__version__ = "0.1.0"
