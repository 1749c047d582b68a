"""A specdec attention backend for GPUs: a Triton kernel over the paged KV cache, for chains and draft trees."""

__version__ = "0.1.0"
