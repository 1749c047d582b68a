"""Several proposers in one: for each request the first that finds a draft, or the most promising."""

__version__ = "0.1.0"
