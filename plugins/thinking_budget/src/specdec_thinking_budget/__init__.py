"""A thinking budget for specdec."""

__version__ = "0.1.0"
