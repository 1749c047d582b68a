"""The version of specdec-core, in the one place where it is written."""

__version__ = "0.1.0"
