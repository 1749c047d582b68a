"""Keeps draft tokens at chosen rates, to measure speed with; lossy."""

__version__ = "0.1.0"
