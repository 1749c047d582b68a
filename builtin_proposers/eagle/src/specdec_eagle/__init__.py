"""EAGLE and EAGLE-3: a head on the target's hidden states drafts chains and trees."""

__version__ = "0.1.0"
