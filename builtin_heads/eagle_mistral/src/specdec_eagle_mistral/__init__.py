"""EAGLE heads in the native Mistral format."""

__version__ = "0.1.0"
