"""Draft tokens with probabilities are verified jointly."""

__version__ = "0.1.0"
