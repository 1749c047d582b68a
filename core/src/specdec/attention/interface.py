"""What the core asks of an attention backend, and the paged KV cache it reads and writes.

One layer's cache is two tensors of slots::

    keys    [num_blocks * block_size, num_kv_heads, head_dim]
    values  [num_blocks * block_size, num_kv_heads, v_head_dim]

    slot = block_id * block_size + offset        request r, position p:  block_id = block_tables[r, p // block_size]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch


@frozen
class KVGeometry:
    """How the slots of a paged cache are numbered."""

    num_blocks: int
    block_size: int


@frozen(eq=False)
class LayerKV:
    """K/V slots of one attention layer."""

    keys: Tensor
    """[num_slots, num_kv_heads, head_dim]."""
    values: Tensor
    """[num_slots, num_kv_heads, v_head_dim]."""


@frozen(eq=False)
class KVCache:
    """K/V of all layers, addressed by the same slots and block tables."""

    layers: tuple[LayerKV, ...]
    """Indexed like ``AttentionRequirements.layers``."""
    num_blocks: int
    """How many blocks every layer has; slots are numbered through all of them."""
    block_size: int
    """Tokens of a block: position p of request r is in slot
    ``block_tables[r, p // block_size] * block_size + p % block_size``."""


class AttentionBackend(ABC):
    """Writes new K/V into the paged cache and attends over it."""

    name: str = ""
    """What messages and ``specdec config`` call it: the entry point's name."""
    priority: int = 0
    """Among the backends that serve an engine, "auto" takes the highest."""

    @abstractmethod
    def supports(self, requirements: AttentionRequirements) -> list[str]:
        """Every reason why this backend cannot serve the engine; empty when it can."""

    @abstractmethod
    def plan(self, batch: PackedBatch, cache: KVCache) -> Any:
        """Prepare what all layers of one step share (masks, index lists). Called once per forward pass."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store K/V of the batch's tokens, then attend causally over each request's cache.

        Args:
            query: [T, num_heads, head_dim]; may be a strided view.
            key: [T, num_kv_heads, head_dim]; may be a strided view.
            value: [T, num_kv_heads, v_head_dim]; may be a strided view.
            layer: which layer, with its scaling, window and soft cap; ``layer.index`` indexes ``KVCache.layers``.
            plan: the value `plan` returned for this step.
            sinks: [num_heads] logits, when ``layer.sinks``.

        Returns:
            [T, num_heads, v_head_dim], contiguous, in the dtype of ``query``.
        """
