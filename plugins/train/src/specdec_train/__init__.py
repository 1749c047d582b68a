"""Trains draft heads on a target's own answers."""

__version__ = "0.1.0"
