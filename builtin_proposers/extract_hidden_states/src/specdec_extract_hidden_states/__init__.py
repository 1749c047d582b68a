"""Writes a target's hidden states and tokens to safetensors files: what heads are trained on."""

__version__ = "0.1.0"
