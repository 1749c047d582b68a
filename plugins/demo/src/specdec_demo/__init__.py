"""The `specdec demo` command."""

__version__ = "0.1.0"
