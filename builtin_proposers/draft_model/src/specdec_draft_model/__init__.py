"""Draft models: a small causal language model proposes tokens that the target verifies."""

__version__ = "0.1.0"
