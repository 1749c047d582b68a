"""What the layers of a step share: items, inputs and scratch, as the kernels' `Step` argument block."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec.cpu.layout import BFLOAT16, FLOAT32, LANES, PANEL
from specdec.cpu.scratch import words
from specdec_attention_cpu.layout import CHUNK, ROWS_BYTES, SCORE_STRIDE, Step
from specdec_attention_cpu.planning import cut, trees_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from specdec.attention.interface import KVCache
    from specdec.cpu.team import Team
    from specdec.types import AttentionLayer, PackedBatch

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16}
"""Element kinds by the name of the dtype."""


class Shape(NamedTuple):
    """Numbers and widths of a layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


def shape_of(layer: AttentionLayer) -> Shape:
    """The shape of a layer."""
    return Shape(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)


class Memory:
    """Working memory of a backend; grows to what its steps need."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0, dtype=torch.uint8)

    def scratch(self, num_bytes: int) -> int:
        """Address of scratch; zeros at first, because padding columns of tiles are multiplied, though never used."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def partials(self, num_bytes: int) -> int:
        """Address of room for partial results."""
        if self._partials.numel() < num_bytes:
            self._partials = torch.empty(num_bytes, dtype=torch.uint8)
        return self._partials.data_ptr()


class StepPlan:
    """A backend's plan of one step; the batch's tensors must stay as they are until the step ends."""

    def __init__(self, batch: PackedBatch, cache: KVCache, memory: Memory, team: Team) -> None:
        self.cache = cache
        self._batch, self._memory, self._team = batch, memory, team
        self._threads = torch.get_num_threads()
        self._query_start_loc, self._seq_lens = batch.query_start_loc.numpy(), batch.seq_lens.numpy()
        tables = batch.block_tables
        self._block_tables = tables if tables.stride(-1) == 1 else tables.contiguous()
        parents, cached = (
            None if tensor is None else tensor.numpy() for tensor in (batch.parents, batch.cached_parents)
        )
        self._trees = trees_of(self._query_start_loc, parents, cached)
        self._steps: dict[Shape, StepBlock] = {}

    def step(self, shape: Shape) -> StepBlock:
        """The argument block for layers of a shape."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self._build(shape)
        return step

    def _build(self, shape: Shape) -> StepBlock:
        batch, group = self._batch, shape.num_heads // shape.num_kv_heads
        tasks, merges, num_partials, vectors = cut(
            self._query_start_loc, self._seq_lens, self._trees, group, shape.num_kv_heads, self._threads
        )
        layout = _scratch_layout(vectors, shape)
        partial_bytes = num_partials * shape.num_kv_heads * vectors * layout[Step.RESULT_STRIDE]
        block = words(
            Step,
            layout
            | {
                Step.TEAM: self._team.address,
                Step.HEADS: shape.num_heads,
                Step.KV_HEADS: shape.num_kv_heads,
                Step.HEAD_DIM: shape.head_dim,
                Step.V_HEAD_DIM: shape.v_head_dim,
                Step.TOKENS: batch.slot_mapping.shape[0],
                Step.SLOTS: batch.slot_mapping.data_ptr(),
                Step.POSITIONS: batch.positions.data_ptr(),
                Step.BLOCK_TABLES: self._block_tables.data_ptr(),
                Step.BLOCK_TABLE_STRIDE: 4 * self._block_tables.stride(0),
                Step.BLOCK_SIZE: self.cache.block_size,
                Step.TASKS: tasks.ctypes.data,
                Step.NUM_TASKS: len(tasks),
                Step.MERGES: merges.ctypes.data,
                Step.NUM_MERGES: len(merges),
                Step.TREES: self._trees.matrices.ctypes.data,
                Step.VECTORS: vectors,
                Step.SCRATCH: self._memory.scratch(layout[Step.SCRATCH_STRIDE] * self._threads),
                Step.PARTIALS: self._memory.partials(partial_bytes),
            },
        )
        return StepBlock(block, (tasks, merges))


class StepBlock:
    """The `Step` words of the layers of one shape, with the arrays they point to."""

    __slots__ = ("_inputs", "_keep", "_words", "address")

    def __init__(self, block: ctypes.Array[ctypes.c_int64], keep: tuple[np.ndarray, np.ndarray]) -> None:
        self._words, self._keep = block, keep
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self.address = ctypes.addressof(block)

    def begin_layer(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Point to a layer's inputs; layers that reuse the same tensors cost next to nothing."""
        block, known = self._words, self._inputs
        block[Step.TICKET] = 0
        if known is not None and query is known[0] and key is known[1] and value is known[2]:
            return
        size = query.element_size()
        block[Step.KIND] = KINDS[str(query.dtype).removeprefix("torch.")]
        inputs = []
        for first_word, tensor in ((Step.QUERY, query), (Step.KEY, key), (Step.VALUE, value)):
            dense = tensor if tensor.stride(2) == 1 else tensor.contiguous()
            block[first_word] = dense.data_ptr()
            block[first_word + 1] = dense.stride(0) * size
            block[first_word + 2] = dense.stride(1) * size
            inputs.append(dense)
        self._inputs = (inputs[0], inputs[1], inputs[2])


@lru_cache(maxsize=64)
def _scratch_layout(vectors: int, shape: Shape) -> dict[Step, int]:
    """Offsets of the parts of a thread's scratch for items of this many query vectors; sized for float32 caches."""
    padded, v_padded = _round_up(shape.head_dim, PANEL), _round_up(shape.v_head_dim, PANEL)
    query_stride, result_stride = 4 * padded + 64, 4 * LANES + 4 * v_padded
    layout, offset = {Step.QUERY_STRIDE: query_stride, Step.RESULT_STRIDE: result_stride}, 0
    for part, size in (
        (Step.QUERIES, vectors * query_stride),
        (Step.SCORES, vectors * SCORE_STRIDE),
        (Step.KEYS, 4 * PANEL * padded),
        (Step.VALUES, 4 * CHUNK * v_padded),
        (Step.ADDED, vectors * result_stride),
        (Step.RUNNING, vectors * result_stride),
        (Step.ROWS, 2 * ROWS_BYTES),
    ):
        layout[part] = offset
        offset += _round_up(size, 64)
    return layout | {Step.SCRATCH_STRIDE: offset}


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
