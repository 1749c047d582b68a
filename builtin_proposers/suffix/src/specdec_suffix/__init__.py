"""Suffix decoding for specdec."""

__version__ = "0.1.0"
