"""Cuts a step's attention into items, once per step (and per number of heads)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec.cpu.library import Kernels
from specdec_attention_cpu.layout import MERGE_WORDS, TASK_WORDS

KERNELS = Kernels("specdec_attention_cpu.cutting", "specdec_attention_cpu.kernels")
"""Attention, and what cuts it into items."""


class Cut(NamedTuple):
    """A step's attention cut into items."""

    tasks: np.ndarray
    """int64 [tasks, TASK_WORDS], the words of `layout.Task` in order; long contexts first."""
    merges: np.ndarray
    """int64 [merges, MERGE_WORDS], the words of `layout.Merge` in order."""
    num_partials: int
    """Partial results that the merges read."""
    vectors: int
    """The most query vectors of a task."""


class Trees(NamedTuple):
    """Who may see whom among the tokens of requests with a tree."""

    offsets: np.ndarray
    """int64 [B], where each request's matrix starts; -1: a chain."""
    matrices: np.ndarray
    """uint8, see `layout.Step.TREES`."""
    num_cached: int
    """Nodes of each request that were cached before the batch."""


def cut(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    trees: Trees,
    group: int,
    kv_heads: int,
    threads: int,
) -> Cut:
    """Cut a step into tasks, and say what must be merged afterwards.

    A request's rows are taken ``MAX_VECTORS // group`` at a time. A task that would keep one thread busy for more than
    half its fair share is split into its chunks.

    Args:
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B].
        trees: who may see whom.
        group: query heads per K/V head.
        kv_heads: number of K/V heads.
        threads: how many threads will share the work.
    """
    order = np.argsort(-seq_lens, kind="stable")
    sizes = np.empty(4, dtype=np.int64)
    KERNELS.function("most_items")(query_start_loc, seq_lens, group, kv_heads, sizes)
    tasks = np.empty((int(sizes[0]), TASK_WORDS), dtype=np.int64)
    merges = np.empty((int(sizes[1]), MERGE_WORDS), dtype=np.int64)
    numbers = (group, kv_heads, threads)
    KERNELS.function("cut_items")(
        query_start_loc, seq_lens, order, trees.offsets, trees.num_cached, *numbers, sizes, tasks, merges
    )
    num_tasks, num_merges, num_partials, vectors = sizes.tolist()
    return Cut(tasks[:num_tasks], merges[:num_merges], num_partials, vectors)


def trees_of(query_start_loc: np.ndarray, parents: np.ndarray | None, cached_parents: np.ndarray | None) -> Trees:
    """Who may see whom among the tokens of requests with a tree.

    Args:
        query_start_loc: int32 [B + 1].
        parents: int32 [T], see `specdec.types.PackedBatch`; None: only chains.
        cached_parents: int32 [B, N] or None, see there.
    """
    offsets = np.full(len(query_start_loc) - 1, -1, dtype=np.int64)
    if parents is None:
        return Trees(offsets, np.zeros(0, dtype=np.uint8), 0)
    if cached_parents is None:
        cached_parents = np.zeros((len(offsets), 0), dtype=np.int32)
    given = query_start_loc, np.ascontiguousarray(parents), np.ascontiguousarray(cached_parents), offsets
    matrices = np.zeros(KERNELS.function("place_trees")(*given), dtype=np.uint8)
    KERNELS.function("fill_trees")(*given, matrices)
    return Trees(offsets, matrices, cached_parents.shape[1])
