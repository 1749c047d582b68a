"""Regions run on torch's threads, or on the calling thread where there is no OpenMP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.cpu.compile import region
from specdec.cpu.simd import get_int64, put_int64
from specdec.cpu.team import Team, barrier, share, thread_count, thread_index


@region
def _who(block: int) -> None:
    """Word 0: team; from word 2 on: each thread's count of threads, after all have written word 1."""
    team = get_int64(block)
    thread = thread_index(team)
    put_int64(block + 64 * (thread + 1), thread_count(team))
    barrier(team, thread_count(team))
    total = 0
    for other in range(thread_count(team)):
        total += get_int64(block + 64 * (other + 1))
    put_int64(block + 64 * (thread + 1) + 8, total)


def _run(team: Team, **options: Any) -> np.ndarray:
    block = np.zeros((4, 8), dtype=np.int64)
    block[0, 0] = team.address
    team.run(_who.address, block.ctypes.data, **options)
    return block[1:]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_runs_on_as_many_threads_as_torch(threads: int, long: bool) -> None:
    """Every thread takes part once, and sees after a barrier what the others wrote before it."""
    torch.set_num_threads(threads)
    rows = _run(Team(), long=long)
    assert rows[:threads, 0].tolist() == [threads] * threads
    assert rows[:threads, 1].tolist() == [threads * threads] * threads
    assert not rows[threads:].any()


def test_runs_alone_without_openmp() -> None:
    """Without a runtime a region runs once, as the only thread."""
    assert _run(Team(parallel=False))[:, 0].tolist() == [1, 0, 0]


def test_a_busy_machine_cannot_stop_a_barrier() -> None:
    """More threads than cores: waiting threads yield, so the region ends."""
    torch.set_num_threads(6)
    block = np.zeros((8, 8), dtype=np.int64)
    team = Team()
    block[0, 0] = team.address
    for _ in range(50):
        team.run(_who.address, block.ctypes.data)
    assert block[1:7, 1].tolist() == [36] * 6


def test_shares_cover_everything_once() -> None:
    """Shares of any number of items among any number of threads are consecutive and complete."""
    for count in (0, 1, 5, 18):
        for threads in (1, 2, 3, 7):
            starts = [share.py_func(count, i, threads) for i in range(threads + 1)]
            assert starts == sorted(starts)
            assert (starts[0], starts[-1]) == (0, count)
