"""Memory of the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec.attention.interface import KVCache, LayerKV
from specdec.cpu.pages import untouched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.attention.interface import KVGeometry
    from specdec.types import AttentionLayer


def kv_bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    """Bytes of K/V that one token takes over the layers."""
    return sum(dtype.itemsize * layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)


def allocate_kv_cache(
    layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, geometry: KVGeometry
) -> KVCache:
    """Make a paged cache, all zeros; on the CPU pages cost memory only once they are written."""
    slots = geometry.num_blocks * geometry.block_size

    def zeros(*shape: int) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return untouched(shape, dtype)

    made = tuple(
        LayerKV(
            keys=zeros(slots, layer.num_kv_heads, layer.head_dim),
            values=zeros(slots, layer.num_kv_heads, layer.v_head_dim),
        )
        for layer in layers
    )
    return KVCache(made, geometry.num_blocks, geometry.block_size)
