"""Reads drafts off the table; a kernel module (`specdec.cpu.compile`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from specdec.cpu.compile import compiled

_TABLE = types.int32[:, ::1]
_INT64, _INT32 = types.int64[::1], types.int32[::1]


@compiled(types.int64(_TABLE, _INT64, _INT64, _INT64, _INT32, _INT64, _INT32, _INT32))
def read_drafts(
    successors: Any,
    shape_parents: Any,
    shape_ranks: Any,
    last_tokens: Any,
    limits: Any,
    token_ids: Any,
    parents: Any,
    counts: Any,
) -> Any:
    """Read the drafts of B requests, leaving out nodes whose token is not known, with those behind them.

    Args:
        successors: int32 [V, M]: the table, negative where nothing is known.
        shape_parents: int64 [n]: of each node of the shape its parent, -1 for the root; parents come first.
        shape_ranks: int64 [n]: of each node its place among what is known behind its parent.
        last_tokens: int64 [B]: of the texts.
        limits: int32 [B]: of each draft; so many of the shape's first nodes are read.
        token_ids: int64 [at least B * n], receives the tokens, packed.
        parents: int32 [at least B * n], receives each node's parent within its draft.
        counts: int32 [B], receives the drafts' lengths.

    Returns:
        The number of tokens.
    """
    total = 0
    place = np.empty(len(shape_parents), dtype=np.int32)
    for r in range(len(last_tokens)):
        count = 0
        for node in range(min(limits[r], len(shape_parents))):
            place[node] = -1
            parent = shape_parents[node]
            above = last_tokens[r]
            above_place = np.int32(-1)
            if parent >= 0:
                above_place = place[parent]
                if above_place < 0:
                    continue
                above = token_ids[total + above_place]
            token = successors[above, shape_ranks[node]]
            if token < 0:
                continue
            place[node] = count
            token_ids[total + count] = token
            parents[total + count] = above_place
            count += 1
        counts[r] = count
        total += count
    return total
