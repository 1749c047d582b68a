"""What the threads of a region need: who they are, barriers, their shares of the work.

Inside a region (`specdec.cpu.team`), threads meet at barriers of our own: OpenMP's let a waiting thread spin for
milliseconds, which on a busy machine takes the core from the very thread it waits for. Here it spins for some
microseconds, then yields.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.layout import ARRIVED, GENERATION, NUM_THREADS, THREAD_NUM, YIELD
from specdec.cpu.simd import I32, I64, at, function, get_int64, kernel, put_int64

_X86 = platform.machine() in ("x86_64", "AMD64")
_SPINS = 1000
"""Pauses at a barrier before the thread yields its core; some tens of microseconds."""


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
    address = get_int64(team + THREAD_NUM)
    return _call(address) if address != 0 else 0


@kernel
def thread_count(team: int) -> int:
    """How many threads run the region; can be fewer than were asked for."""
    address = get_int64(team + NUM_THREADS)
    return _call(address) if address != 0 else 1


@kernel
def barrier(team: int, threads: int) -> None:
    """Wait until all ``threads`` threads of the region are here; what they wrote is then visible."""
    if threads == 1:
        return
    generation = _read_atomically(team + GENERATION)
    if add_atomically(team + ARRIVED, 1) == threads - 1:
        put_int64(team + ARRIVED, 0)
        add_atomically(team + GENERATION, 1)
        return
    spins = 0
    while _read_atomically(team + GENERATION) == generation:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _call(get_int64(team + YIELD))


@kernel
def share(count: int, index: int, threads: int) -> int:
    """Where thread ``index``'s contiguous share of ``count`` items starts; it ends where the next one starts."""
    return count * index // threads
