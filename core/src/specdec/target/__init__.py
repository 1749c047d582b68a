"""Transformers models as targets: finding, loading, checking and running them."""
