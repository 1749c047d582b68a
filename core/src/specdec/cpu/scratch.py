"""Working memory of the compiled regions, one per Python thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from attrs import frozen

from specdec.cpu.layout import FEW_ROWS, TILE_BYTES

_CACHED_BYTES = 1 << 20
"""The float32 left side of a product should fit a core's second-level cache beside the weights passing through."""
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 32, 256
_PAD_BYTES = 64
"""Between rows, so that rows of a power-of-two width do not share cache sets."""


@frozen
class Area:
    """Scratch for products: ``num_areas`` times ``block_rows`` rows, then each thread's own."""

    address: int
    stride: int
    """Bytes between rows."""
    block_rows: int


class _Scratch(threading.local):
    memory = torch.empty(0, dtype=torch.uint8)


_scratch = _Scratch()


def reserve(width: int, num_areas: int = 1) -> Area:
    """Scratch for float32 rows of ``width``; valid until this thread's next call with a larger need."""
    stride = -(-4 * width // 64) * 64 + _PAD_BYTES
    fitting = _CACHED_BYTES // stride // 8 * 8
    block_rows = max(_MIN_BLOCK_ROWS, min(_MAX_BLOCK_ROWS, fitting))
    per_thread = TILE_BYTES + FEW_ROWS * stride
    needed = num_areas * block_rows * stride + torch.get_num_threads() * per_thread
    if _scratch.memory.numel() < needed:
        _scratch.memory = torch.zeros(needed, dtype=torch.uint8)
    return Area(_scratch.memory.data_ptr(), stride, block_rows)


def words(names: type[IntEnum], values: Mapping[Any, int]) -> ctypes.Array[ctypes.c_int64]:
    """An argument block with the given words set and the others 0."""
    block = (ctypes.c_int64 * len(names))()
    for name, value in values.items():
        block[name] = value
    return block
