"""EAGLE heads with Llama 4 layers."""

__version__ = "0.1.0"
