"""Runs compiled kernels on torch's own OpenMP threads.

A second thread pool would compete with torch's for the cores. torch ships libgomp (or loads LLVM's libomp, which
exports the same entry points); a region starts with the call that compilers make for ``#pragma omp parallel``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import frozen

from specdec.cpu.layout import STATE_BYTES, TEAM_TILE_ENTRY
from specdec.cpu.library import Kernels
from specdec.cpu.openmp import library_path

KERNELS = Kernels("specdec.cpu.tiles", "specdec.cpu.regions")
"""Products, norms, and the layers made of them."""


@frozen(eq=False)
class _Runtime:
    """Entry points of the OpenMP library."""

    start: Any
    start_holding_gil: Any
    thread_num: int
    num_threads: int
    yield_core: int


@cache
def _runtime() -> _Runtime | None:
    """The OpenMP runtime loaded into this process, torch's own if there are several."""
    path = library_path()
    if path is None:
        return None
    library, holding_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
    for start in (library.GOMP_parallel, holding_gil.GOMP_parallel):
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
    return _Runtime(
        library.GOMP_parallel,
        holding_gil.GOMP_parallel,
        _address(library.omp_get_thread_num),
        _address(library.omp_get_num_threads),
        _address(ctypes.CDLL(None).sched_yield),
    )


def _address(entry: Any) -> int:
    return ctypes.cast(entry, ctypes.c_void_p).value or 0


class Team:
    """The threads that run one object's regions, one region at a time."""

    def __init__(self, *, parallel: bool = True) -> None:
        """Prepare the state that regions share.

        Args:
            parallel: False: regions run on the calling thread alone; so they do where no OpenMP runtime is loaded.
        """
        self._runtime = _runtime() if parallel else None
        self._memory = np.zeros(STATE_BYTES + 64, dtype=np.uint8)
        self.address: int = -(-self._memory.ctypes.data // 64) * 64
        """Of the state; kernels take it in their argument block."""
        state = (ctypes.c_int64 * 4).from_address(self.address)
        state[TEAM_TILE_ENTRY // 8] = KERNELS.address("tile_entry")
        if self._runtime is not None:
            state[0], state[1] = self._runtime.thread_num, self._runtime.num_threads
            state[2] = self._runtime.yield_core

    def run(self, region: int, arguments: int, *, long: bool = False) -> None:
        """Run a region on torch's threads and wait for it.

        Args:
            region: address of a function declared with `specdec.cpu.compile.region`.
            arguments: address of its argument block.
            long: let other Python threads run meanwhile; costs more per call.
        """
        runtime = self._runtime
        if runtime is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(region)(arguments)
        elif long:
            runtime.start(region, arguments, torch.get_num_threads(), 0)
        else:
            runtime.start_holding_gil(region, arguments, torch.get_num_threads(), 0)
