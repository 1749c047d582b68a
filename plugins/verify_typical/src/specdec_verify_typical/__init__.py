"""Keeps draft tokens that the target finds plausible; lossy."""

__version__ = "0.1.0"
