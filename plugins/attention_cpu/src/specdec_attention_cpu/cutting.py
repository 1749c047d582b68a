"""The compiled part of `specdec_attention_cpu.planning`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from specdec.cpu.compile import compiled
from specdec_attention_cpu.layout import CHUNK, MAX_VECTORS, TASK_WORDS

_INT32, _INT64, _BYTES = types.int32[::1], types.int64[::1], types.uint8[::1]
_TABLE = types.int64[:, ::1]
_NODES = types.int32[:, ::1]


@compiled(types.int64(_INT32, _INT32, _NODES, _INT64))
def place_trees(query_start_loc: Any, parents: Any, cached_parents: Any, offsets: Any) -> Any:
    """Find where each request's matrix starts, -1 for chains; returns the bytes needed."""
    total, cached = 0, cached_parents.shape[1]
    for request in range(len(offsets)):
        first, rows = query_start_loc[request], query_start_loc[request + 1] - query_start_loc[request]
        branches = False
        for node in range(cached):
            branches |= cached_parents[request, node] != node - 1
        for row in range(rows):
            branches |= parents[first + row] != cached + row - 1
        offsets[request] = total if branches else -1
        if branches:
            total += (cached + rows) * (cached + rows)
    return total


@compiled(types.void(_INT32, _INT32, _NODES, _INT64, _BYTES))
def fill_trees(query_start_loc: Any, parents: Any, cached_parents: Any, offsets: Any, matrices: Any) -> None:
    """A node's ancestors are its parent's, one level further away, and itself."""
    cached = cached_parents.shape[1]
    for request in range(len(offsets)):
        if offsets[request] < 0:
            continue
        first, rows = query_start_loc[request], query_start_loc[request + 1] - query_start_loc[request]
        nodes = cached + rows
        for node in range(nodes):
            own = offsets[request] + node * nodes
            parent = cached_parents[request, node] if node < cached else parents[first + node - cached]
            if parent >= 0:
                for other in range(node):
                    levels = matrices[offsets[request] + parent * nodes + other]
                    if levels > 0:
                        matrices[own + other] = levels + 1
            matrices[own + node] = 1


@compiled(types.void(_INT32, _INT32, types.int64, types.int64, _INT64))
def most_items(query_start_loc: Any, seq_lens: Any, group: int, kv_heads: int, sizes: Any) -> None:
    """Bounds of what `cut_items` gives: the most tasks and merges, then the cost of all to go by."""
    rows_per_item = max(1, MAX_VECTORS // group)
    sizes[:] = 0
    for request in range(len(seq_lens)):
        rows = query_start_loc[request + 1] - query_start_loc[request]
        blocks, chunks = (rows + rows_per_item - 1) // rows_per_item, (seq_lens[request] + CHUNK - 1) // CHUNK
        sizes[0] += blocks * chunks
        sizes[1] += blocks
        sizes[2] += rows * chunks * kv_heads


@compiled(
    types.void(
        _INT32, _INT32, _INT64, _INT64, types.int64, types.int64, types.int64, types.int64, _INT64, _TABLE, _TABLE
    )
)
def cut_items(
    query_start_loc: Any,
    seq_lens: Any,
    order: Any,
    trees: Any,
    cached_nodes: int,
    group: int,
    kv_heads: int,
    threads: int,
    sizes: Any,
    tasks: Any,
    merges: Any,
) -> None:
    """See `specdec_attention_cpu.planning.cut`.

    Args:
        query_start_loc: see there.
        seq_lens: see there.
        order: int64 [B], requests as they are to be cut.
        trees: see there.
        cached_nodes: see there.
        group: see there.
        kv_heads: see there.
        threads: see there.
        sizes: as `most_items` leaves it; receives the numbers of tasks, merges and partials, and the most vectors.
        tasks: receives the tasks.
        merges: receives the merges.
    """
    rows_per_item = max(1, MAX_VECTORS // group)
    total_cost = sizes[2]
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
                values = (request, start, first, end, context, length, *of_chunk, trees[request], rows, cached_nodes)
                for i in range(TASK_WORDS):
                    tasks[num_tasks, i] = values[i]
                num_tasks += 1
            if split:
                for i, value in enumerate((start + first, end - first, num_partials, chunks)):
                    merges[num_merges, i] = value
                num_merges += 1
                num_partials += chunks
    sizes[0], sizes[1], sizes[2], sizes[3] = num_tasks, num_merges, num_partials, most_rows * group
