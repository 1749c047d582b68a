"""The CPU attention backend: compiled kernels over the paged cache."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.attention.interface import AttentionBackend
from specdec.cpu.scratch import words
from specdec.cpu.simd import BFLOAT16, FLOAT32, LANES
from specdec.cpu.team import Team
from specdec.cpu.tiles import PANEL
from specdec_attention_cpu.kernels import CHUNK, SCORE_STRIDE, Attention, Step, attention_region
from specdec_attention_cpu.planning import ancestor_matrices, cut

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.attention.interface import KVCache
    from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

_KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16}
_LONG_TOKENS = 64
"""From this many tokens on a layer's attention takes long enough to let other Python threads run."""


def _float_word(value: float) -> int:
    """A float32 in the low half of an int64."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class StepPlan:
    """What the layers of one step share."""

    def __init__(self, batch: PackedBatch, cache: KVCache, threads: int) -> None:
        """Take views of the batch's arrays; they must stay as they are during the step."""
        self.cache = cache
        self._batch = batch
        self._threads = threads
        self._query_start_loc = batch.query_start_loc.numpy()
        self._seq_lens = batch.seq_lens.numpy()
        self._block_tables = (
            batch.block_tables if batch.block_tables.stride(-1) == 1 else batch.block_tables.contiguous()
        )
        parents = None if batch.parents is None else batch.parents.numpy()
        self._tree_offsets, self._matrices = ancestor_matrices(self._query_start_loc, parents)
        self._tables: dict[tuple[int, int], StepTables] = {}

    def tables(self, num_heads: int, num_kv_heads: int) -> StepTables:
        """The items for layers with these numbers of heads."""
        key = (num_heads, num_kv_heads)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = self._build_tables(num_heads // num_kv_heads, num_kv_heads)
        return tables

    def _build_tables(self, group: int, num_kv_heads: int) -> StepTables:
        batch = self._batch
        tasks, merges = cut(
            self._query_start_loc, self._seq_lens, self._tree_offsets, group, num_kv_heads, self._threads
        )
        vectors = group * int((tasks[:, 3] - tasks[:, 2]).max())
        block = words(
            Step,
            {
                Step.TOKENS: batch.input_ids.shape[0],
                Step.SLOTS: batch.slot_mapping.data_ptr(),
                Step.POSITIONS: batch.positions.data_ptr(),
                Step.BLOCK_TABLES: self._block_tables.data_ptr(),
                Step.BLOCK_TABLE_STRIDE: 4 * self._block_tables.stride(0),
                Step.BLOCK_SIZE: self.cache.block_size,
                Step.TASKS: tasks.ctypes.data,
                Step.NUM_TASKS: len(tasks),
                Step.MERGES: merges.ctypes.data,
                Step.NUM_MERGES: len(merges),
                Step.TREES: self._matrices.ctypes.data,
                Step.VECTORS: vectors,
            },
        )
        return StepTables(block, (tasks, merges), vectors, int(merges[:, 3].sum()) * num_kv_heads)


class StepTables:
    """One `Step` argument block with the arrays it points to."""

    __slots__ = ("_block", "_keep", "address", "num_partials", "vectors")

    def __init__(
        self, block: ctypes.Array[ctypes.c_int64], keep: tuple[np.ndarray, np.ndarray], vectors: int, num_partials: int
    ) -> None:
        self._block, self._keep = block, keep
        self.address = ctypes.addressof(block)
        self.vectors = vectors
        self.num_partials = num_partials


class CpuBackend(AttentionBackend):
    """Attention on CPU cores: float32 and bfloat16 caches, grouped heads, windows, chunks, soft caps, sinks and
    trees."""

    name = "cpu"
    priority = 10

    def __init__(self) -> None:
        self._team = Team()
        self._layers: dict[int, _LayerBlock] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0, dtype=torch.uint8)

    def supports(self, requirements: AttentionRequirements) -> list[str]:
        """See `AttentionBackend.supports`."""
        reasons = []
        if requirements.device != "cpu":
            reasons.append(f"runs on the CPU, the engine on {requirements.device}")
        if requirements.dtype not in _KINDS:
            reasons.append(f"caches {' or '.join(_KINDS)}, the engine computes in {requirements.dtype}")
        for layer in requirements.layers:
            if layer.head_dim % 2 or layer.num_heads % layer.num_kv_heads:
                reasons.append(
                    f"layer {layer.index}: needs an even head_dim and a multiple of the K/V heads, "
                    f"got head_dim {layer.head_dim} and {layer.num_heads} heads over {layer.num_kv_heads}"
                )
        return reasons

    def plan(self, batch: PackedBatch, cache: KVCache) -> StepPlan:
        """See `AttentionBackend.plan`."""
        return StepPlan(batch, cache, torch.get_num_threads())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        num_tokens = query.shape[0]
        out = query.new_empty(num_tokens, layer.num_heads, layer.v_head_dim)
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
        cache, tables = plan.cache.layers[layer.index], plan.tables(layer.num_heads, layer.num_kv_heads)
        prepared = self._layers.get(layer.index)
        if prepared is None or prepared.layer is not layer or prepared.dtype != query.dtype:
            prepared = self._layers[layer.index] = _LayerBlock(layer, query.dtype, self._team)
        block = prepared.words
        size = query.element_size()
        block[Attention.QUERY] = query.data_ptr()
        block[Attention.QUERY_TOKEN_STRIDE] = query.stride(0) * size
        block[Attention.QUERY_HEAD_STRIDE] = query.stride(1) * size
        block[Attention.KEY] = key.data_ptr()
        block[Attention.KEY_TOKEN_STRIDE] = key.stride(0) * size
        block[Attention.KEY_HEAD_STRIDE] = key.stride(1) * size
        block[Attention.VALUE] = value.data_ptr()
        block[Attention.VALUE_TOKEN_STRIDE] = value.stride(0) * size
        block[Attention.VALUE_HEAD_STRIDE] = value.stride(1) * size
        block[Attention.OUTPUT] = out.data_ptr()
        block[Attention.KEY_CACHE] = cache.keys.data_ptr()
        block[Attention.VALUE_CACHE] = cache.values.data_ptr()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        block[Attention.SINKS] = 0 if sinks is None else sinks.data_ptr()
        block[Attention.STEP] = tables.address
        block[Attention.TICKET] = 0
        self._reserve(prepared, tables)
        self._team.run(attention_region.address, prepared.address, long=num_tokens >= _LONG_TOKENS)
        return out

    def _reserve(self, prepared: _LayerBlock, tables: StepTables) -> None:
        """Scratch for every thread, and room for partial results."""
        prepared.fit(tables.vectors)
        block = prepared.words
        needed = block[Attention.SCRATCH_STRIDE] * torch.get_num_threads()
        if self._scratch.numel() < needed:
            self._scratch = torch.zeros(needed, dtype=torch.uint8)
        block[Attention.SCRATCH] = self._scratch.data_ptr()
        if tables.num_partials:
            needed = tables.num_partials * tables.vectors * block[Attention.RESULT_STRIDE]
            if self._partials.numel() < needed:
                self._partials = torch.empty(needed, dtype=torch.uint8)
            block[Attention.PARTIALS] = self._partials.data_ptr()


class _LayerBlock:
    """A layer's argument block; what does not change from step to step is set once."""

    def __init__(self, layer: AttentionLayer, dtype: torch.dtype, team: Team) -> None:
        self.layer, self.dtype = layer, dtype
        self._vectors = 0
        self.words = words(
            Attention,
            {
                Attention.TEAM: team.address,
                Attention.KIND: _KINDS[str(dtype).removeprefix("torch.")],
                Attention.HEADS: layer.num_heads,
                Attention.KV_HEADS: layer.num_kv_heads,
                Attention.HEAD_DIM: layer.head_dim,
                Attention.V_HEAD_DIM: layer.v_head_dim,
                Attention.SCALING: _float_word(layer.scaling),
                Attention.SOFTCAP: _float_word(layer.softcap or 0.0),
                Attention.WINDOW: layer.sliding_window or 0,
                Attention.CHUNK_SIZE: layer.chunk_size or 0,
            },
        )
        self.address = ctypes.addressof(self.words)

    def fit(self, vectors: int) -> None:
        """Lay out a thread's scratch for items of this many query vectors."""
        if vectors == self._vectors:
            return
        self._vectors = vectors
        padded, v_padded = (_round_up(dim, PANEL) for dim in (self.layer.head_dim, self.layer.v_head_dim))
        query_stride = 4 * padded + 64
        result_stride = 4 * LANES + 4 * v_padded
        offset = 0
        for part, size in (
            (Attention.QUERIES, vectors * query_stride),
            (Attention.SCORES, vectors * SCORE_STRIDE),
            (Attention.KEYS, 4 * PANEL * padded),
            (Attention.VALUES, 4 * CHUNK * v_padded),
            (Attention.ADDED, vectors * result_stride),
            (Attention.RUNNING, vectors * result_stride),
            (Attention.ROWS, 2 * 8 * PANEL),
        ):
            self.words[part] = offset
            offset += _round_up(size, 64)
        self.words[Attention.SCRATCH_STRIDE] = offset
        self.words[Attention.QUERY_STRIDE] = query_stride
        self.words[Attention.RESULT_STRIDE] = result_stride


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
