"""The attention backend: launches the kernels.."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from specdec.attention.interface import AttentionBackend

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.attention.interface import KVCache
    from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import), on CPU tensors."""
MAX_HEAD_DIM = 256
DTYPES = ("float32", "bfloat16", "float16")
PART = 1024
"""Tokens of a part of a long context."""
MAX_SPLIT_QUERIES = 64
"""Steps with more tokens of one request than this have enough programs without cutting contexts."""
_WALK = 64
"""Tokens whose ancestors one program finds."""


class TritonBackend(AttentionBackend):
    """See the kernels: grouped heads, windows, chunks, soft caps, sinks, draft trees, contexts cut into parts."""

    name = "triton"
    priority = -1 if INTERPRETED else 10

    def __init__(self, part: int = PART) -> None:
        """Cut contexts into parts of ``part`` tokens, a multiple of 64."""
        self._part = part

    def supports(self, requirements: AttentionRequirements) -> list[str]:
        """See `AttentionBackend.supports`."""
        reasons = []
        wanted = "cpu" if INTERPRETED else "cuda"
        if requirements.device != wanted:
            reasons.append(f"runs on {wanted}, the engine on {requirements.device}")
        if requirements.dtype not in DTYPES:
            reasons.append(f"caches {', '.join(DTYPES)}, the engine computes in {requirements.dtype}")
        for layer in requirements.layers:
            if max(layer.head_dim, layer.v_head_dim) > MAX_HEAD_DIM or layer.num_heads % layer.num_kv_heads:
                reasons.append(
                    f"layer {layer.index}: needs heads up to {MAX_HEAD_DIM} wide and a multiple of the K/V heads, got "
                    f"widths {layer.head_dim} and {layer.v_head_dim}, {layer.num_heads} heads over {layer.num_kv_heads}"
                )
        return reasons

    def plan(self, batch: PackedBatch, cache: KVCache) -> StepPlan:
        """See `AttentionBackend.plan`."""
        return StepPlan(batch, cache, self._part)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        plan: StepPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        with _on(query.device):
            plan.store(key, value, layer)
            return plan.attend(query, layer, sinks)


class StepPlan:
    """What the layers of a step share."""

    def __init__(self, batch: PackedBatch, cache: KVCache, part: int) -> None:
        self.cache = cache
        self._batch = batch
        tables = batch.block_tables
        self._tables = tables if tables.stride(1) == 1 else tables.contiguous()
        self._num_requests = batch.seq_lens.shape[0]
        self._num_nodes = 0 if batch.cached_parents is None else batch.cached_parents.shape[1]
        self._num_words = -(-(self._num_nodes + batch.max_query_len) // 64)
        self._words = self._node_depths = None
        if batch.parents is not None:
            self._words, self._node_depths = self._ancestors(batch.parents)
        cut = batch.max_query_len <= MAX_SPLIT_QUERIES and batch.max_seq_len > part
        self._part = part if cut else 0
        self._parts = -(-batch.max_seq_len // part) if cut else 1

    def _ancestors(self, parents: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T, words]: who each token sees of its request's tree; int32 [B, N]: depths of cached nodes."""
        words = torch.empty(parents.shape[0], self._num_words, dtype=torch.int64, device=parents.device)
        cached = parents if self._batch.cached_parents is None else self._batch.cached_parents.contiguous()
        depths = torch.empty_like(cached)
        grid = (self._num_requests, _parts_of(self._num_nodes + self._batch.max_query_len, _WALK))
        with _on(parents.device):
            _kernels().ancestor_words[grid](
                parents,
                cached,
                self._batch.query_start_loc,
                words,
                depths,
                self._num_nodes,
                WORDS=self._num_words,
                BLOCK=_WALK,
            )
        return words, depths

    def store(self, key: Tensor, value: Tensor, layer: AttentionLayer) -> None:
        """Write a layer's new K/V to their slots."""
        kv = self.cache.layers[layer.index]
        key, value = _dense(key), _dense(value)
        _kernels().store_kv[(key.shape[0],)](
            key,
            key.stride(0),
            key.stride(1),
            value,
            value.stride(0),
            value.stride(1),
            self._batch.slot_mapping,
            kv.keys,
            kv.values,
            KV_HEADS=layer.num_kv_heads,
            HEAD_DIM=layer.head_dim,
            V_HEAD_DIM=layer.v_head_dim,
            BLOCK_H=_power_of_two(layer.num_kv_heads),
            BLOCK_D=_width(layer.head_dim),
            BLOCK_DV=_width(layer.v_head_dim),
        )

    def attend(self, query: Tensor, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
        """A layer's attention, [T, num_heads, v_head_dim]."""
        query = _dense(query)
        num_tokens, heads = query.shape[0], layer.num_heads
        out = query.new_empty(num_tokens, heads, layer.v_head_dim)
        if self._part:
            results = query.new_empty(num_tokens, heads, self._parts, layer.v_head_dim, dtype=torch.float32)
            log_sums = query.new_empty(num_tokens, heads, self._parts, dtype=torch.float32)
        else:
            results = log_sums = out
        self._launch(query, layer, sinks, results, log_sums)
        if self._part:
            _kernels().join_parts[(self._num_requests, self._batch.max_query_len, heads)](
                results,
                log_sums,
                self._batch.query_start_loc,
                self._batch.seq_lens,
                out,
                self._parts,
                HEADS=heads,
                V_HEAD_DIM=layer.v_head_dim,
                PART=self._part,
                PARTS=_power_of_two(self._parts),
                BLOCK_DV=_width(layer.v_head_dim),
            )
        return out

    def _launch(
        self, query: Tensor, layer: AttentionLayer, sinks: Tensor | None, results: Tensor, log_sums: Tensor
    ) -> None:
        batch, kv = self._batch, self.cache.layers[layer.index]
        group = layer.num_heads // layer.num_kv_heads
        rows = batch.max_query_len * group
        block_m, block_n = _tiles(rows, layer, query.element_size())
        query_blocks = _parts_of(rows, block_m)
        _kernels().attend[(self._num_requests * query_blocks, layer.num_kv_heads, self._parts)](
            query,
            query.stride(0),
            query.stride(1),
            kv.keys,
            kv.values,
            self._tables,
            self._tables.stride(0),
            batch.query_start_loc,
            batch.seq_lens,
            batch.positions,
            batch.positions if self._words is None else self._words,
            batch.positions if self._node_depths is None else self._node_depths,
            self._num_nodes,
            query if sinks is None else sinks.contiguous(),
            results,
            log_sums,
            float(layer.scaling),
            float(layer.softcap or 1.0),
            layer.sliding_window or 0,
            layer.chunk_size or 0,
            query_blocks,
            KV_HEADS=layer.num_kv_heads,
            GROUP=group,
            HEAD_DIM=layer.head_dim,
            V_HEAD_DIM=layer.v_head_dim,
            BLOCK_SIZE=self.cache.block_size,
            WORDS=self._num_words if self._words is not None else 1,
            HAS_TREE=self._words is not None,
            HAS_SINKS=sinks is not None,
            HAS_SOFTCAP=layer.softcap is not None,
            HAS_WINDOW=layer.sliding_window is not None,
            HAS_CHUNK=layer.chunk_size is not None,
            WIDEN=INTERPRETED,
            PART=self._part,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=_width(layer.head_dim),
            BLOCK_DV=_width(layer.v_head_dim),
        )


def _tiles(rows: int, layer: AttentionLayer, element_size: int) -> tuple[int, int]:
    """Rows and keys of a tile: smaller for wide heads and float32, so that they fit the shared memory."""
    wide = max(layer.head_dim, layer.v_head_dim) > 128
    most = 32 if wide or element_size == 4 else 64
    return max(16, min(most, _power_of_two(rows))), 32 if wide or element_size == 4 else 64


def _width(head_dim: int) -> int:
    return max(16, _power_of_two(head_dim))


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _kernels() -> Any:
    """The compiled kernels; imported when something is launched, so that engines on other devices pay nothing."""
    from specdec_attention_triton import kernels

    return kernels


def _parts_of(total: int, size: int) -> int:
    """How many parts of ``size`` cover ``total``."""
    return -(-total // size)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
