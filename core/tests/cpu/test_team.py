"""Regions run on torch's threads, or on the calling thread where there is no OpenMP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.cpu.library import Kernels
from specdec.cpu.team import Team


def _run(examples: Kernels, team: Team, **options: Any) -> np.ndarray:
    block = np.zeros((4, 8), dtype=np.int64)
    block[0, 0] = team.address
    team.run(examples.address("who"), block.ctypes.data, **options)
    return block[1:]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_runs_on_as_many_threads_as_torch(examples: Kernels, threads: int, long: bool) -> None:
    """Every thread takes part once, and sees after a barrier what the others wrote before it."""
    torch.set_num_threads(threads)
    rows = _run(examples, Team(), long=long)
    assert rows[:threads, 0].tolist() == [threads] * threads
    assert rows[:threads, 1].tolist() == [threads * threads] * threads
    assert not rows[threads:].any()


def test_runs_alone_without_openmp(examples: Kernels) -> None:
    """Without a runtime a region runs once, as the only thread."""
    assert _run(examples, Team(parallel=False))[:, 0].tolist() == [1, 0, 0]


def test_a_busy_machine_cannot_stop_a_barrier(examples: Kernels) -> None:
    """More threads than cores: waiting threads yield, so the region ends."""
    torch.set_num_threads(6)
    block = np.zeros((8, 8), dtype=np.int64)
    team = Team()
    block[0, 0] = team.address
    for _ in range(50):
        team.run(examples.address("who"), block.ctypes.data)
    assert block[1:7, 1].tolist() == [36] * 6


def test_shares_cover_everything_once() -> None:
    """Shares of any number of items among any number of threads are consecutive and complete."""
    from specdec.cpu.threads import share

    for count in (0, 1, 5, 18):
        for threads in (1, 2, 3, 7):
            starts = [share.py_func(count, i, threads) for i in range(threads + 1)]
            assert starts == sorted(starts)
            assert (starts[0], starts[-1]) == (0, count)
