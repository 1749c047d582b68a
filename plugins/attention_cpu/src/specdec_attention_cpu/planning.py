"""Cuts a step's attention into items, once per step (and per number of heads)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from specdec.cpu.compile import compiled
from specdec_attention_cpu.kernels import CHUNK, MAX_VECTORS, MERGE_WORDS, TASK_WORDS

_INT32, _INT64, _BYTES = types.int32[::1], types.int64[::1], types.uint8[::1]
_TABLE = types.int64[:, ::1]
_CUT = types.Tuple((_TABLE, _TABLE, types.int64, types.int64))


@compiled(types.int64(_INT32, _INT32, _INT64))
def _place_trees(query_start_loc: Any, parents: Any, offsets: Any) -> Any:
    """Find where each request's ancestor matrix starts, -1 for chains; returns the bytes needed."""
    total = 0
    for request in range(len(offsets)):
        first, rows = query_start_loc[request], query_start_loc[request + 1] - query_start_loc[request]
        branches = False
        for row in range(rows):
            branches |= parents[first + row] != row - 1
        offsets[request] = total if branches else -1
        if branches:
            total += rows * rows
    return total


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
                for other in range(row):
                    matrices[own + other] = matrices[offsets[request] + parent * rows + other]
            matrices[own + row] = 1


@compiled(_CUT(_INT32, _INT32, _INT64, _INT64, types.int64, types.int64, types.int64))
def _cut(query_start_loc: Any, seq_lens: Any, order: Any, trees: Any, group: int, kv_heads: int, threads: int) -> Any:
    """See `cut`."""
    rows_per_item = max(1, MAX_VECTORS // group)
    total_cost, most_tasks, most_merges = 0, 0, 0
    for request in order:
        rows = query_start_loc[request + 1] - query_start_loc[request]
        blocks, chunks = (rows + rows_per_item - 1) // rows_per_item, (seq_lens[request] + CHUNK - 1) // CHUNK
        total_cost += rows * chunks * kv_heads
        most_tasks += blocks * chunks
        most_merges += blocks
    tasks = np.empty((most_tasks, TASK_WORDS), np.int64)
    merges = np.empty((most_merges, MERGE_WORDS), np.int64)
    num_tasks, num_merges, num_partials, most_rows = 0, 0, 0, 0
    for request in order:
        start, length = np.int64(query_start_loc[request]), np.int64(seq_lens[request])
        rows = query_start_loc[request + 1] - start
        context = length - rows
        for first in range(0, rows, rows_per_item):
            end = min(rows, first + rows_per_item)
            chunks = (context + end + CHUNK - 1) // CHUNK
            split = chunks > 1 and 2 * threads * (end - first) * chunks > total_cost
            most_rows = max(most_rows, end - first)
            for piece in range(chunks if split else 1):
                of_chunk = (piece, piece + 1, num_partials + piece) if split else (0, chunks, -1)
                values = (request, start, first, end, context, length, *of_chunk, trees[request], rows)
                for i in range(TASK_WORDS):
                    tasks[num_tasks, i] = values[i]
                num_tasks += 1
            if split:
                for i, value in enumerate((start + first, end - first, num_partials, chunks)):
                    merges[num_merges, i] = value
                num_merges += 1
                num_partials += chunks
    return tasks[:num_tasks], merges[:num_merges], num_partials, most_rows * group


class Cut(NamedTuple):
    """A step's attention cut into items."""

    tasks: np.ndarray
    """int64 [tasks, TASK_WORDS], the words of `kernels.Task` in order; long contexts first."""
    merges: np.ndarray
    """int64 [merges, MERGE_WORDS], the words of `kernels.Merge` in order."""
    num_partials: int
    """Partial results that the merges read."""
    vectors: int
    """The most query vectors of a task."""


def cut(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, trees: np.ndarray, group: int, kv_heads: int, threads: int
) -> Cut:
    """Cut a step into tasks, and say what must be merged afterwards.

    A request's rows are taken ``MAX_VECTORS // group`` at a time. A task that would keep one thread busy for more than
    half its fair share is split into its chunks.

    Args:
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B].
        trees: int64 [B], offsets of ancestor matrices, -1 for chains.
        group: query heads per K/V head.
        kv_heads: number of K/V heads.
        threads: how many threads will share the work.
    """
    order = np.argsort(-seq_lens, kind="stable")
    return Cut(*_cut(query_start_loc, seq_lens, order, trees, group, kv_heads, threads))


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
    matrices = np.zeros(_place_trees(query_start_loc, parents, offsets), dtype=np.uint8)
    _fill_trees(query_start_loc, parents, offsets, matrices)
    return offsets, matrices
