"""Cuts a step's attention into items, once per step (and per number of heads)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from specdec.cpu.compile import compiled
from specdec_attention_cpu.kernels import CHUNK, MAX_VECTORS, MERGE_WORDS, TASK_WORDS

_INT32, _INT64, _BYTES = types.int32[::1], types.int64[::1], types.uint8[::1]
_TABLE = types.int64[:, ::1]


@compiled(types.UniTuple(types.int64, 2)(_INT32, _INT32, _INT64))
def _measure_trees(query_start_loc: Any, parents: Any, offsets: Any) -> Any:
    """Where each request's ancestor matrix starts, -1 for chains; the bytes needed and the largest tree's rows."""
    total, largest = 0, 0
    for request in range(len(offsets)):
        first, rows = query_start_loc[request], query_start_loc[request + 1] - query_start_loc[request]
        offsets[request] = -1
        for row in range(rows):
            if parents[first + row] != row - 1:
                offsets[request] = total
                total += rows * rows
                largest = max(largest, rows)
                break
    return total, largest


@compiled(types.void(_INT32, _INT32, _INT64, _BYTES))
def _fill_trees(query_start_loc: Any, parents: Any, offsets: Any, matrices: Any) -> None:
    """A row's ancestors are its parent's and itself."""
    for request in range(len(offsets)):
        if offsets[request] < 0:
            continue
        first, rows = query_start_loc[request], query_start_loc[request + 1] - query_start_loc[request]
        for row in range(rows):
            own, parent = offsets[request] + row * rows, parents[first + row]
            if parent >= 0:
                inherited = offsets[request] + parent * rows
                matrices[own : own + rows] = matrices[inherited : inherited + rows]
            matrices[own + row] = 1


@compiled(types.UniTuple(_TABLE, 2)(_INT32, _INT32, _INT64, _INT64, types.int64, types.int64, types.int64))
def _cut(
    query_start_loc: Any, seq_lens: Any, order: Any, trees: Any, group: int, kv_heads: int, threads: int
) -> tuple[Any, Any]:
    """See `cut`."""
    rows_per_item = max(1, MAX_VECTORS // group)
    total_cost, num_tasks, num_chunks = 0, 0, 0
    for request in range(len(order)):
        rows, length = query_start_loc[request + 1] - query_start_loc[request], seq_lens[request]
        blocks, chunks = (rows + rows_per_item - 1) // rows_per_item, (length + CHUNK - 1) // CHUNK
        total_cost += rows * chunks * kv_heads
        num_tasks += blocks * chunks
        num_chunks += blocks
    tasks = np.empty((num_tasks, TASK_WORDS), np.int64)
    merges = np.empty((num_chunks, MERGE_WORDS), np.int64)
    task, merge, partial = 0, 0, 0
    for request in order:
        first, length = query_start_loc[request], seq_lens[request]
        rows = query_start_loc[request + 1] - first
        for first_row in range(0, rows, rows_per_item):
            end_row = min(rows, first_row + rows_per_item)
            context = length - rows
            chunks = (context + end_row + CHUNK - 1) // CHUNK
            split = chunks > 1 and 2 * threads * (end_row - first_row) * chunks > total_cost
            pieces = chunks if split else 1
            for piece in range(pieces):
                tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3] = request, first, first_row, end_row
                tasks[task, 4], tasks[task, 5] = context, length
                tasks[task, 6], tasks[task, 7] = (piece, piece + 1) if split else (0, chunks)
                tasks[task, 8] = partial + piece if split else -1
                tasks[task, 9], tasks[task, 10] = trees[request], rows
                task += 1
            if split:
                merges[merge, 0], merges[merge, 1] = first + first_row, end_row - first_row
                merges[merge, 2], merges[merge, 3] = partial, pieces
                merge += 1
                partial += pieces
    return tasks[:task], merges[:merge]


def cut(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    trees: np.ndarray,
    group: int,
    kv_heads: int,
    threads: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The tasks of a step, long contexts first, and the merges of those that are split.

    A request's rows are taken ``MAX_VECTORS // group`` at a time. A task that would keep one thread busy for more than
    half its fair share is split into its chunks.

    Args:
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B].
        trees: int64 [B], offsets of ancestor matrices, -1 for chains.
        group: query heads per K/V head.
        kv_heads: number of K/V heads.
        threads: how many threads will share the work.

    Returns:
        int64 [tasks, TASK_WORDS] (`kernels.Task`) and int64 [merges, MERGE_WORDS] (`kernels.Merge`).
    """
    order = np.argsort(-seq_lens, kind="stable")
    return _cut(query_start_loc, seq_lens, order, trees, group, kv_heads, threads)


def ancestor_matrices(query_start_loc: np.ndarray, parents: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Who may see whom among the tokens of requests with a tree.

    Args:
        query_start_loc: int32 [B + 1].
        parents: int32 [T], indices among the request's own tokens; None: only chains.

    Returns:
        int64 [B], the offset of each request's matrix or -1, and uint8 with the matrices [rows, rows], 1 for ancestors
        and self.
    """
    offsets = np.full(len(query_start_loc) - 1, -1, dtype=np.int64)
    if parents is None:
        return offsets, np.zeros(0, dtype=np.uint8)
    size, _ = _measure_trees(query_start_loc, parents, offsets)
    matrices = np.zeros(size, dtype=np.uint8)
    _fill_trees(query_start_loc, parents, offsets, matrices)
    return offsets, matrices
