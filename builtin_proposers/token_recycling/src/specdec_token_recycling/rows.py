"""Writes and reads the table's rows; a kernel module (`specdec.cpu.compile`).

The table has a row for each of V tokens, and behind these a row for each of S places. A pair of tokens has one place,
which the pair written last keeps; ``pairs`` holds which one that is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from specdec.cpu.compile import compiled

_TABLE = types.int32[:, ::1]
_INT64, _INT32 = types.int64[::1], types.int32[::1]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: products with it spread over all of its range (Knuth's multiplicative hashing)."""


@njit
def _pair(successors: Any, pairs: Any, before: int, token: int) -> Any:
    return before * (len(successors) - len(pairs)) + token


@njit
def _place(pairs: Any, pair: int) -> Any:
    high = np.uint64(pair) * _SPREAD >> np.uint64(32)
    return np.int64(high * np.uint64(len(pairs)) >> np.uint64(32))


@njit
def _row_of_pair(successors: Any, pairs: Any, before: int, token: int) -> Any:
    """The row of a pair; negative when nothing is known of it, as at a text's beginning (``before`` negative)."""
    if before < 0:
        return np.int64(-1)
    pair = _pair(successors, pairs, before, token)
    place = _place(pairs, pair)
    return len(successors) - len(pairs) + place if pairs[place] == pair else np.int64(-1)


@njit
def _own_row(successors: Any, pairs: Any, before: int, token: int) -> Any:
    """The row to write for a pair; one that is new begins with what is known of its second token."""
    pair = _pair(successors, pairs, before, token)
    place = _place(pairs, pair)
    row = len(successors) - len(pairs) + place
    if pairs[place] != pair:
        pairs[place] = pair
        successors[row] = successors[token]
    return row


@compiled(types.void(_TABLE, _INT64, _INT64, _INT64, types.int64[:, ::1]))
def learn_rows(successors: Any, pairs: Any, before: Any, token_ids: Any, likeliest: Any) -> None:
    """Replace what is known of R tokens, and of each behind the one before it; of equal ones the last counts.

    Args:
        successors: int32 [V + S, M]: the table, negative where nothing is known.
        pairs: int64 [S]: whose row each place is, negative for nobody's.
        before: int64 [R]: the tokens before them, negative where there is none.
        token_ids: int64 [R].
        likeliest: int64 [R, M], the likeliest first.
    """
    for i in range(len(token_ids)):
        token = token_ids[i]
        if before[i] >= 0:
            row = _own_row(successors, pairs, before[i], token)
            for rank in range(successors.shape[1]):
                successors[row, rank] = likeliest[i, rank]
        for rank in range(successors.shape[1]):
            successors[token, rank] = likeliest[i, rank]


@njit
def _move_to_front(row: Any, token: int) -> None:
    ahead = np.int32(token)
    for rank in range(len(row)):
        here = row[rank]
        row[rank] = ahead
        if here == token:
            return
        ahead = here


@compiled(types.void(_TABLE, _INT64, _INT64, types.int64))
def learn_text(successors: Any, pairs: Any, text: Any, start: int) -> None:
    """Put what follows tokens of a text before what is known of them, and of each behind the one before it.

    Args:
        successors: as for `learn_rows`.
        pairs: likewise.
        text: int64 [n].
        start: index of the first token of which to learn; the last has no follower.
    """
    for i in range(start, len(text) - 1):
        token, follower = text[i], text[i + 1]
        if i > 0:
            _move_to_front(successors[_own_row(successors, pairs, text[i - 1], token)], follower)
        _move_to_front(successors[token], follower)


@compiled(types.int64(_TABLE, _INT64, _INT64, _INT64, types.int64[:, ::1], _INT32, _INT64, _INT32, _INT32))
def read_drafts(
    successors: Any,
    pairs: Any,
    shape_parents: Any,
    shape_ranks: Any,
    last_two: Any,
    limits: Any,
    token_ids: Any,
    parents: Any,
    counts: Any,
) -> Any:
    """Read the drafts of B requests, leaving out nodes whose token is not known, with those behind them.

    The first level is read behind the last two tokens, or else behind the last one; further levels behind pairs alone.

    Args:
        successors: as for `learn_rows`.
        pairs: likewise.
        shape_parents: int64 [n]: of each node of the shape its parent, -1 for the root; parents come first.
        shape_ranks: int64 [n]: of each node its place among what is known behind its parent.
        last_two: int64 [B, 2]: the ends of the texts; the first is negative where a text is one token.
        limits: int32 [B]: of each draft; so many of the shape's first nodes are read.
        token_ids: int64 [at least B * n], receives the tokens, packed.
        parents: int32 [at least B * n], receives each node's parent within its draft.
        counts: int32 [B], receives the drafts' lengths.

    Returns:
        The number of tokens.
    """
    total = 0
    place = np.empty(len(shape_parents), dtype=np.int32)
    rows = np.empty(len(shape_parents), dtype=np.int64)
    for r in range(len(last_two)):
        count = 0
        last = last_two[r, 1]
        root = _row_of_pair(successors, pairs, last_two[r, 0], last)
        if root < 0:
            root = last
        for node in range(min(limits[r], len(shape_parents))):
            place[node], rows[node] = -1, -1
            parent = shape_parents[node]
            row, above, above_place = root, last, np.int32(-1)
            if parent >= 0:
                row, above_place = rows[parent], place[parent]
                if row < 0:
                    continue
                above = token_ids[total + above_place]
            token = successors[row, shape_ranks[node]]
            if token < 0:
                continue
            place[node] = count
            rows[node] = _row_of_pair(successors, pairs, above, token)
            token_ids[total + count] = token
            parents[total + count] = above_place
            count += 1
        counts[r] = count
        total += count
    return total
