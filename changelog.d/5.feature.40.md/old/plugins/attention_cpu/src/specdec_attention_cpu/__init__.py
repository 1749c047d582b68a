"""A specdec attention backend for CPUs: compiled kernels over the paged KV cache."""

__version__ = "0.1.0"
