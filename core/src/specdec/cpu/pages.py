"""Memory for weights and the KV cache, in huge pages.

A decode step reads all weights once. In pages of 4 KiB that is some ten thousand address translations a step for every
hundred megabytes, and the processor waits for many of them. Linux gives pages of 2 MiB to memory that asks for them,
unless they are switched off (`/sys/kernel/mm/transparent_hugepage/enabled` says ``never``).
"""

from __future__ import annotations

import math
import mmap
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 256 << 20
"""Asked for at a time; pages of it that nobody writes cost nothing."""
_SMALLEST = 256 << 10
"""Bytes from which a tensor comes from a chunk; smaller ones gain nothing, and would keep their chunk alive."""
_MANY_PAGES = 4 << 20
"""Bytes from which untouched memory may be used up 2 MiB at a time."""
_LINE = 64


class _Mapping:
    """Memory from the system, handed out from the beginning; it lives as long as a tensor in it."""

    def __init__(self, num_bytes: int, *, huge: bool) -> None:
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **private)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._used = -start % _HUGE_PAGE
        self._end = self._used + num_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Zeros, or None when they do not fit any more."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._end:
            return None
        taken = torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape), offset=self._used)
        self._used += -(-num_bytes // _LINE) * _LINE
        return taken.view(shape)


_lock = threading.Lock()
_open: list[_Mapping] = []
"""The mapping that still has room, if any."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, side by side in huge pages where they are large enough and the system has such pages."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SMALLEST:
        return torch.zeros(shape, dtype=dtype)
    with _lock:
        taken = _open[0].take(shape, dtype) if _open else None
        if taken is None:
            _open[:] = [_Mapping(max(_CHUNK, num_bytes), huge=True)]
            taken = _open[0].take(shape, dtype)
    assert taken is not None
    return taken


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages cost memory only once they are written; huge pages when there are many.

    The allocators of numpy and torch may hand out memory that was freed before, which they must write.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    taken = _Mapping(num_bytes, huge=num_bytes >= _MANY_PAGES).take(shape, dtype)
    assert taken is not None
    return taken
