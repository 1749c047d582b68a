"""Kernels that the tests call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from specdec.cpu.compile import compiled, native, region
from specdec.cpu.layout import FLOAT32, LANES
from specdec.cpu.simd import exp, get_int64, load, put_int64, rounded, store, sum_lanes, tanh
from specdec.cpu.threads import barrier, thread_count, thread_index


@native(types.intp, types.intp, types.intp)
def exp_all(source: int, out: int, count: int) -> None:
    for i in range(0, count, LANES):
        store(FLOAT32, out, i, count, exp(load(FLOAT32, source, i, count)))


@native(types.intp, types.intp, types.intp)
def tanh_all(source: int, out: int, count: int) -> None:
    for i in range(0, count, LANES):
        store(FLOAT32, out, i, count, tanh(load(FLOAT32, source, i, count)))


@native(*[types.intp] * 5)
def copy(from_kind: int, source: int, to_kind: int, out: int, count: int) -> None:
    for i in range(0, count, LANES):
        store(to_kind, out, i, count, rounded(to_kind, load(from_kind, source, i, count)))


@compiled(types.float32(types.intp, types.intp))
def sum_some(source: int, count: int) -> float:
    return sum_lanes(load(FLOAT32, source, 0, count))


@compiled("float64(float64[:,::1], boolean, uint32)")
def weighted(values: Any, doubled: bool, first: int) -> Any:
    """Rows times their number, and an array made and dropped on the way."""
    sums = np.zeros(values.shape[0], dtype=np.float64)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            sums[i] += values[i, j] * (i + first)
    total = sums.sum()
    return 2 * total if doubled else total


@region
def who(block: int) -> None:
    """Word 0: team; from word 2 on: each thread's count of threads, after all have written word 1."""
    team = get_int64(block)
    thread = thread_index(team)
    put_int64(block + 64 * (thread + 1), thread_count(team))
    barrier(team, thread_count(team))
    total = 0
    for other in range(thread_count(team)):
        total += get_int64(block + 64 * (other + 1))
    put_int64(block + 64 * (thread + 1) + 8, total)
