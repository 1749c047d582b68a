"""EAGLE heads of MiniCPM."""

__version__ = "0.1.0"
