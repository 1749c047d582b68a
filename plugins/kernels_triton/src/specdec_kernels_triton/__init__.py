"""A specdec sampling backend for GPUs: Triton kernels for draws and rejection sampling."""

__version__ = "0.1.0"
