"""Compiled phases of a decoder layer: norms, products with packed weights, gated activations, rotary positions.

A *phase* is called by every thread of a region with its index and does its share of the rows or columns. Phases that
depend on one another are separated by barriers. Rounding follows the modules of transformers: norms, linear outputs,
activations and residual sums are rounded to the model's dtype, everything between is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.features import WHOLE_ROWS
from specdec.cpu.layout import ADD, BFLOAT16, FLOAT32, LANES, LINEAR_WORDS, NORM_WORDS, PANEL, SILU, STORE
from specdec.cpu.simd import (
    broadcast,
    fma,
    get_float32,
    get_int64,
    kernel,
    load,
    load_float32,
    rounded,
    sigmoid,
    store,
    sum_lanes,
    tanh,
)
from specdec.cpu.threads import share
from specdec.cpu.tiles import AHEAD_BYTES, num_tiles, tile

# A linear's description: int64 words at these offsets (bytes).
_WEIGHTS, _KIND, _PAIRS, _PANELS, _COLUMNS, _BIAS = (8 * i for i in range(LINEAR_WORDS))

# A norm's description. The weight is float32; eps is a float32 in the low half of its word.
_NORM_WEIGHT, _NORM_EPS, _NORM_WIDTH, _NORM_ROUNDS_FIRST = (8 * i for i in range(NORM_WORDS))

_F = np.float32
_ZERO, _HALF, _ONE = _F(0.0), _F(0.5), _F(1.0)
_GELU_SCALE, _GELU_CUBE = _F(0.7978845608028654), _F(0.044715)


@kernel
def _activate(mode: int, x: Any) -> Any:
    if mode == SILU:
        return x * sigmoid(x)
    inner = broadcast(_GELU_SCALE) * fma(x * x * x, broadcast(_GELU_CUBE), x)
    return broadcast(_HALF) * x * (broadcast(_ONE) + tanh(inner))


@kernel
def _biased(products: int, bias: int, column: int, columns: int) -> Any:
    value = load_float32(products)
    if bias != 0:
        return value + load(FLOAT32, bias, column, columns)
    return value


@kernel
def _finish_row(
    mode: int, kind: int, products: int, bias: int, panel: int, columns: int, out_kind: int, out: int
) -> None:
    """Bias, rounding and the product's destination for one row of one panel."""
    first, second = panel * PANEL, panel * PANEL + LANES
    low = rounded(kind, _biased(products, bias, first, columns))
    high = rounded(kind, _biased(products + 4 * LANES, bias, second, columns))
    if mode in (STORE, ADD):
        if mode == ADD:
            low = load(out_kind, out, first, columns) + low
            if second < columns:
                high = load(out_kind, out, second, columns) + high
        store(out_kind, out, first, columns, low)
        if second < columns:
            store(out_kind, out, second, columns, high)
    else:
        gated = rounded(kind, rounded(kind, _activate(mode, low)) * high)
        store(out_kind, out, panel * LANES, panel * LANES + LANES, gated)


@kernel
def project(
    team: int,
    linear: int,
    left: int,
    left_stride: int,
    rows: int,
    mode: int,
    out_kind: int,
    out: int,
    out_stride: int,
    products: int,
    thread: int,
    threads: int,
) -> None:
    """Multiply rows by a packed linear's weights; threads share the panels, and the rows where panels are few.

    Args:
        team: of the region.
        linear: address of the linear's description.
        left: float32 [rows, 2 * pairs], ``left_stride`` bytes apart.
        left_stride: bytes.
        rows: how many.
        mode: STORE, ADD, SILU or GELU_TANH.
        out_kind: element kind of ``out``.
        out: [rows, columns] (gated: [rows, columns / 2], with room for whole panels), ``out_stride`` bytes apart.
        out_stride: bytes.
        products: this thread's scratch of TILE_BYTES.
        thread: index of the thread.
        threads: how many there are.
    """
    kind, pairs, bias = get_int64(linear + _KIND), get_int64(linear + _PAIRS), get_int64(linear + _BIAS)
    panels, columns = get_int64(linear + _PANELS), get_int64(linear + _COLUMNS)
    panel_bytes = pairs * PANEL * (4 if kind == BFLOAT16 else 8)
    parts = min(max(1, 4 * threads // panels), num_tiles(rows))
    for item in range(share(panels * parts, thread, threads), share(panels * parts, thread + 1, threads)):
        panel, part = item // parts, item % parts
        weights = get_int64(linear + _WEIGHTS) + panel * panel_bytes
        start, end = share(rows, part, parts), share(rows, part + 1, parts)
        tiles = num_tiles(end - start)
        for t in range(tiles):
            row = start + share(end - start, t, tiles)
            count = start + share(end - start, t + 1, tiles) - row
            ahead, ahead_step = weights + AHEAD_BYTES, panel_bytes // pairs
            if tiles > 1 or count > WHOLE_ROWS:
                ahead, ahead_step = weights + panel_bytes + t * panel_bytes // tiles, ahead_step // tiles
            source = left + row * left_stride
            tile(team, kind, count, source, left_stride, weights, pairs, products, 4 * PANEL, ahead, ahead_step)
            for i in range(count):
                target = out + (row + i) * out_stride
                _finish_row(mode, kind, products + 4 * PANEL * i, bias, panel, columns, out_kind, target)


@kernel
def _inverse_rms(kind: int, source: int, width: int, eps: float) -> Any:
    total = broadcast(_ZERO)
    for i in range(0, width, LANES):
        x = load(kind, source, i, width)
        total = fma(x, x, total)
    return broadcast(_ONE / np.sqrt(sum_lanes(total) / _F(width) + eps))


@kernel
def normalize_row(norm: int, kind: int, source: int, out_kind: int, out: int) -> None:
    """RMS norm of one row of ``kind``; the result, rounded to ``kind``, is stored as ``out_kind``."""
    width, weight = get_int64(norm + _NORM_WIDTH), get_int64(norm + _NORM_WEIGHT)
    scale = _inverse_rms(kind, source, width, get_float32(norm + _NORM_EPS))
    rounds_first = get_int64(norm + _NORM_ROUNDS_FIRST) != 0
    for i in range(0, width, LANES):
        x = load(kind, source, i, width) * scale
        if rounds_first:
            x = rounded(kind, x)
        store(out_kind, out, i, width, rounded(kind, x * load(FLOAT32, weight, i, width)))


@kernel
def normalize(
    norm: int, kind: int, source: int, stride: int, rows: int, out: int, out_stride: int, thread: int, threads: int
) -> None:
    """RMS norm of rows of ``kind`` into float32 rows, as the left side of a product; threads share the rows."""
    for row in range(share(rows, thread, threads), share(rows, thread + 1, threads)):
        normalize_row(norm, kind, source + row * stride, FLOAT32, out + row * out_stride)


@kernel
def widen_rows(
    kind: int, source: int, stride: int, width: int, rows: int, out: int, out_stride: int, thread: int, threads: int
) -> None:
    """Copy rows of ``kind`` to float32 rows; threads share the rows, or the columns of a single row."""
    for row in range(share(rows, thread, threads), share(rows, thread + 1, threads)):
        for i in range(0, width, LANES):
            store(FLOAT32, out + row * out_stride, i, width, load(kind, source + row * stride, i, width))


@kernel
def rotate_head(kind: int, head: int, rotary: int, cos: int, sin: int) -> None:
    """Rotate one head in place, half against half; ``cos`` and ``sin`` are of ``kind``, ``rotary`` wide."""
    half = rotary // 2
    size = 2 if kind == BFLOAT16 else 4
    for i in range(0, half, LANES):
        first, second = load(kind, head, i, half), load(kind, head + half * size, i, half)
        c, s = load(kind, cos, i, half), load(kind, sin, i, half)
        store(kind, head, i, half, rounded(kind, first * c) - rounded(kind, second * s))
        store(kind, head + half * size, i, half, rounded(kind, second * c) + rounded(kind, first * s))
