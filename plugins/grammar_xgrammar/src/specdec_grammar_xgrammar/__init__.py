"""Structured output for specdec through XGrammar."""

__version__ = "0.1.0"
