"""Attention over the paged KV cache: the backend interface and the built-in SDPA backend."""

from specdec.attention.interface import AttentionBackend, KVCache, LayerKV

__all__ = ["AttentionBackend", "KVCache", "LayerKV"]
