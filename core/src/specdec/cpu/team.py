"""Runs compiled kernels on torch's own OpenMP threads.

A second thread pool would compete with torch's for the cores. torch ships libgomp (or loads LLVM's libomp, which
exports the same entry points); a region starts with the call that compilers make for ``#pragma omp parallel``.

Inside a region, threads meet at barriers of our own: OpenMP's let a waiting thread spin for milliseconds, which on a
busy machine takes the core from the very thread it waits for. Here it spins for some microseconds, then yields.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import frozen
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.openmp import library_path
from specdec.cpu.simd import I32, I64, at, function, get_int64, kernel, put_int64
from specdec.cpu.tiles import TEAM_TILE_ENTRY, tile_entry

_X86 = platform.machine() in ("x86_64", "AMD64")
_SPINS = 1000
"""Pauses at a barrier before the thread yields its core; some tens of microseconds."""

# A team's state: entry points of the runtime and of `specdec.cpu.tiles`, then, in cache lines of their own, the
# barrier's two counters.
_THREAD_NUM, _NUM_THREADS, _YIELD, _ARRIVED, _GENERATION, _STATE_BYTES = 0, 8, 16, 64, 128, 192


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
        self._memory = np.zeros(_STATE_BYTES + 64, dtype=np.uint8)
        self.address: int = -(-self._memory.ctypes.data // 64) * 64
        """Of the state; kernels take it in their argument block."""
        state = (ctypes.c_int64 * 4).from_address(self.address)
        state[TEAM_TILE_ENTRY // 8] = tile_entry.address
        if self._runtime is not None:
            state[0], state[1] = self._runtime.thread_num, self._runtime.num_threads
            state[2] = self._runtime.yield_core

    def run(self, region: int, arguments: int, *, long: bool = False) -> None:
        """Run a region on torch's threads and wait for it.

        Args:
            region: address of a function compiled by `specdec.cpu.compile.region`.
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


@intrinsic
def _call(_context: Any, address: Any) -> Any:
    """Call ``int function(void)``."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        entry = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(I32, [])))
        return builder.sext(builder.call(entry, []), I64)

    return types.intp(types.intp), generate


@intrinsic
def _pause(_context: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def generate(context: Any, builder: Any, _s: Any, _a: Any) -> Any:
        if _X86:
            builder.call(function(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def add_atomically(_context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address; the value before."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", at(builder, args[0]), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _read_atomically(_context: Any, address: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.load_atomic(at(builder, args[0]), "seq_cst", 8, typ=I64)

    return types.intp(types.intp), generate


@kernel
def thread_index(team: int) -> int:
    """Which thread of the region this is."""
    address = get_int64(team + _THREAD_NUM)
    return _call(address) if address != 0 else 0


@kernel
def thread_count(team: int) -> int:
    """How many threads run the region; can be fewer than were asked for."""
    address = get_int64(team + _NUM_THREADS)
    return _call(address) if address != 0 else 1


@kernel
def barrier(team: int, threads: int) -> None:
    """Wait until all ``threads`` threads of the region are here; what they wrote is then visible."""
    if threads == 1:
        return
    generation = _read_atomically(team + _GENERATION)
    if add_atomically(team + _ARRIVED, 1) == threads - 1:
        put_int64(team + _ARRIVED, 0)
        add_atomically(team + _GENERATION, 1)
        return
    spins = 0
    while _read_atomically(team + _GENERATION) == generation:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _call(get_int64(team + _YIELD))


@kernel
def share(count: int, index: int, threads: int) -> int:
    """Where thread ``index``'s contiguous share of ``count`` items starts; it ends where the next one starts."""
    return count * index // threads
