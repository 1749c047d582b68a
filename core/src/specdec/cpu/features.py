"""What this processor offers to the compiled kernels."""

from __future__ import annotations

import llvmlite.binding

_FEATURES = llvmlite.binding.get_host_cpu_features()

WIDE_VECTORS = bool(_FEATURES.get("avx512f", False))
"""512-bit registers, 32 of them; otherwise 16 registers of 256 bits (or less) are assumed."""

MAX_ROWS = 12 if WIDE_VECTORS else 3
"""Rows of a tile: with 32 columns they must fit the registers with room for the operands."""
