"""What the processor that kernels are compiled for offers to them."""

from __future__ import annotations

import llvmlite.binding
from numba import config

from specdec.cpu.layout import MOST_TILE_ROWS


def _has(feature: str) -> bool:
    """Whether code is generated for a feature; ``NUMBA_CPU_FEATURES`` overrides what this processor has."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


WIDE_VECTORS = _has("avx512f")
"""512-bit registers, 32 of them; otherwise 16 registers of 256 bits (or less) are assumed."""

MAX_ROWS = MOST_TILE_ROWS if WIDE_VECTORS else 6
"""Rows of a tile: their sums must fit the registers with room for the operands."""

WHOLE_ROWS = MAX_ROWS if WIDE_VECTORS else 2
"""Rows of a tile whose sums for all 32 columns fit; more rows take the panel's columns half by half."""
