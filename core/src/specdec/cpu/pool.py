"""Runs compiled kernels on torch's own OpenMP threads.

A second thread pool would compete with torch's for the cores. torch ships libgomp (or loads LLVM's libomp, which
exports the same entry points); a region starts with the call that compilers make for ``#pragma omp parallel``. Inside
a region, kernels ask the runtime who they are and meet at its barriers through the addresses in `Pool.block`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.simd import I32, I64, get_int64, kernel

_MAPS = Path("/proc/self/maps")


def _library_path() -> str | None:
    """The OpenMP runtime loaded into this process, torch's own if there are several."""
    if not _MAPS.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines() if ".so" in line}
    runtimes = sorted(path for path in loaded if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))
    own = [path for path in runtimes if path.startswith(str(Path(torch.__file__).parent))]
    return next(iter(own or runtimes), None)


class Pool:
    """torch's OpenMP threads, as kernels use them."""

    def __init__(self, path: str | None) -> None:
        """Look up the runtime's entry points.

        Args:
            path: of the OpenMP library; None: regions run on the calling thread alone.
        """
        self.parallel = path is not None
        addresses = [0, 0, 0]
        if path is not None:
            library, holding_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
            names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
            addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
            self._start, self._start_holding_gil = library.GOMP_parallel, holding_gil.GOMP_parallel
            for start in (self._start, self._start_holding_gil):
                start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                start.restype = None
        self._addresses = np.array(addresses, dtype=np.int64)
        self.block: int = self._addresses.ctypes.data
        """Address of the runtime's entry points; kernels take it in their argument block."""

    def run(self, region: int, arguments: int, *, long: bool = False) -> None:
        """Run a region on torch's threads and wait for it.

        Args:
            region: address of a function compiled by `specdec.cpu.compile.region`.
            arguments: address of its argument block.
            long: let other Python threads run meanwhile; costs more per call.
        """
        if not self.parallel:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(region)(arguments)
        elif long:
            self._start(region, arguments, torch.get_num_threads(), 0)
        else:
            self._start_holding_gil(region, arguments, torch.get_num_threads(), 0)


@cache
def pool() -> Pool:
    """The process's pool."""
    return Pool(_library_path())


def _caller(result: Any, result_type: Any) -> Any:
    @intrinsic
    def call(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            function = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(result, [])))
            value = builder.call(function, [])
            return context.get_dummy_value() if result_type is types.void else builder.sext(value, I64)

        return result_type(types.intp), generate

    return call


_call_int = _caller(I32, types.intp)
_call_void = _caller(ir.VoidType(), types.void)


@kernel
def thread_index(block: int) -> int:
    """Which thread of the region this is."""
    address = get_int64(block)
    return _call_int(address) if address != 0 else 0


@kernel
def thread_count(block: int) -> int:
    """How many threads run the region; can be fewer than were asked for."""
    address = get_int64(block + 8)
    return _call_int(address) if address != 0 else 1


@kernel
def barrier(block: int) -> None:
    """Wait until every thread of the region is here; what they wrote is then visible."""
    address = get_int64(block + 16)
    if address != 0:
        _call_void(address)


@kernel
def share(count: int, index: int, threads: int) -> int:
    """Where thread ``index``'s contiguous share of ``count`` items starts; it ends where the next one starts."""
    return count * index // threads
