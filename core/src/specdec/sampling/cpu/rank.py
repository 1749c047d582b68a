"""The first tokens of a row by logit, the lower token id first among equals, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import compiled
from specdec.cpu.simd import inlined, kernel
from specdec.sampling.cpu.bits import LOWEST_KEY, as_float, order_key

_SPAN = 64
_TOKEN_BITS = np.int64(0xFFFFFFFF)


@inlined
def rank_key(value: Any, token: Any) -> Any:
    """An int64 that is larger for what ranks before: a larger logit, then a lower token id."""
    return (np.int64(order_key(value)) << np.int64(32)) | (_TOKEN_BITS - np.int64(token))


@inlined
def token_of(key: Any) -> Any:
    """The token id in a rank key."""
    return _TOKEN_BITS - (key & _TOKEN_BITS)


@inlined
def sift_down(heap: Any, at: Any, size: Any, key: Any) -> None:
    """Let ``key`` sink from place ``at`` of a min-heap, whose content there is lost, to its place."""
    i = at
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = key


@kernel
def best_keys(row: Any, count: Any) -> Any:
    """The rank keys of the ``count`` first tokens of a row of float32, or of bfloat16 as uint16, first one first."""
    heap = np.full(count, np.int64(-0x7FFFFFFFFFFFFFFF), dtype=np.int64)
    for start in range(0, row.shape[0], _SPAN):
        span = row[start : start + _SPAN]
        top = LOWEST_KEY
        for i in range(span.shape[0]):
            top = np.int32(max(top, order_key(as_float(span[i]))))
        # An equal logit further on has a higher token id and ranks behind.
        if np.int64(top) <= heap[0] >> np.int64(32):
            continue
        for i in range(span.shape[0]):
            key = rank_key(as_float(span[i]), start + i)
            if key > heap[0]:
                sift_down(heap, 0, count, key)
    for size in range(count - 1, 0, -1):
        smallest, last = heap[0], heap[size]
        sift_down(heap, 0, size, last)
        heap[size] = smallest
    return heap


@kernel
def _write_first_tokens(logits: Any, out: Any) -> None:
    for r in range(logits.shape[0]):
        keys = best_keys(logits[r], out.shape[1])
        for i in range(out.shape[1]):
            out[r, i] = token_of(keys[i])


@compiled("void(float32[:,::1], int64[:,::1])")
def first_tokens(logits: Any, out: Any) -> None:
    """Write the first ``out.shape[1]`` tokens of each row of ``logits`` [R, V] into ``out`` [R, n]."""
    _write_first_tokens(logits, out)


@compiled("void(uint16[:,::1], int64[:,::1])")
def first_tokens_of_bfloat16(logits: Any, out: Any) -> None:
    """As `first_tokens`, with the bits of bfloat16 numbers."""
    _write_first_tokens(logits, out)
