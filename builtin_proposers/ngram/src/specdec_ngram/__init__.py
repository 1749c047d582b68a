"""N-gram lookup: a proposer that copies drafts from earlier occurrences of the latest tokens."""

__version__ = "0.1.0"
