"""Rearranges K and V rows of the cache into the panels that `specdec.cpu.tiles` multiplies with.

Both are panels of 32 columns whose rows come in pairs. For scores the columns are tokens and the rows head dimensions,
so K is transposed; for the output the columns are head dimensions and the rows tokens::

    K panel    bfloat16 [head_dim / 2][32 tokens][2]      float32 [head_dim][32 tokens]
    V panel    bfloat16 [tokens / 2][32 dims][2]          float32 [tokens][32 dims]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.layout import BFLOAT16, FLOAT32, LANES, PANEL
from specdec.cpu.simd import (
    I16,
    I32,
    I64,
    POINTER,
    V16I,
    Vec,
    at,
    function,
    get_int64,
    kernel,
    load,
    splat,
    store_float32,
)

_ROW_BYTES = 4 * PANEL
V32H = ir.VectorType(I16, 2 * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 words by exchanging ever smaller blocks: 8x8, 4x4, 2x2, 1x1."""
    rows = list(rows)
    for block in (8, 4, 2, 1):
        for i in range(LANES):
            if i & block:
                continue
            a, b = rows[i], rows[i + block]
            upper = [lane if not lane & block else LANES + lane - block for lane in range(LANES)]
            lower = [lane + block if not lane & block else LANES + lane for lane in range(LANES)]
            rows[i], rows[i + block] = _shuffle(builder, a, b, upper), _shuffle(builder, a, b, lower)
    return rows


def _read(builder: Any, vector: Any, address: Any, count: Any) -> Any:
    """A vector from memory: all of it if ``count`` is None, or the first ``count`` lanes, the others 0.

    Where the instruction set has no masked load of this width, LLVM makes a branch of every lane.
    """
    bits = vector.element.width
    if count is None:
        return builder.load(at(builder, address), align=bits // 8, typ=vector)
    lanes = ir.Constant(ir.VectorType(I32, vector.count), list(range(vector.count)))
    below = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), lanes.type))
    masked = function(
        builder, f"llvm.masked.load.v{vector.count}i{bits}.p0", vector, [POINTER, I32, below.type, vector]
    )
    return builder.call(masked, [at(builder, address), I32(bits // 8), below, ir.Constant(vector, None)])


def _transpose(builder: Any, rows: Any, offset: Any, count: Any, out: Any) -> None:
    loaded = []
    for row in range(LANES):
        pointer = at(builder, builder.add(rows, I64(8 * row)))
        address = builder.add(builder.load(pointer, align=8, typ=I64), offset)
        loaded.append(_read(builder, V16I, address, count))
    for k, column in enumerate(_transposed(builder, loaded)):
        builder.store(column, at(builder, builder.add(out, I64(k * _ROW_BYTES))), align=64)


def _pair(builder: Any, first: Any, second: Any, count: Any, out: Any) -> None:
    a, b = (_read(builder, V32H, row, count) for row in (first, second))
    for half in range(2):
        lanes = [lane for i in range(LANES * half, LANES * (half + 1)) for lane in (i, 2 * LANES + i)]
        pairs = builder.bitcast(_shuffle(builder, a, b, lanes), V16I)
        builder.store(pairs, at(builder, builder.add(out, I64(64 * half))), align=64)


def _whole_and_some(emit: Callable[..., None]) -> tuple[Any, Any]:
    """Intrinsics for whole vectors and for those of which ``count`` lanes are in memory."""

    @intrinsic
    def whole(_context: Any, a: Any, b: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            emit(builder, args[0], args[1], None, args[2])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3), generate

    @intrinsic
    def some(_context: Any, a: Any, b: Any, count: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            emit(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return whole, some


_transpose_whole, _transpose_some = _whole_and_some(_transpose)
_pair_whole, _pair_some = _whole_and_some(_pair)


@kernel
def _transpose_words(rows: int, offset: int, count: int, out: int) -> None:
    """Words ``offset`` bytes into each of 16 rows, transposed; only ``count`` of them are read, the others are 0."""
    if count >= LANES:
        _transpose_whole(rows, offset, out)
    else:
        _transpose_some(rows, offset, count, out)


@kernel
def _interleave(first: int, second: int, count: int, out: int) -> None:
    """Up to 32 16-bit values of two rows as 32 pairs."""
    if count >= PANEL:
        _pair_whole(first, second, out)
    else:
        _pair_some(first, second, count, out)


@intrinsic
def outside_to_minus_infinity(_context: Any, scores: Any, first: Any, end: Any) -> Any:
    """Lanes before ``first`` and from ``end`` on become -inf; the others stay."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        lanes = ir.Constant(V16I, list(range(LANES)))
        first, end = (splat(builder, builder.trunc(bound, I32), V16I) for bound in args[1:])
        inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        nothing = ir.Constant(args[0].type, [float("-inf")] * LANES)
        return builder.select(inside, args[0], nothing)

    return Vec(Vec, types.intp, types.intp), generate


@kernel
def pack_keys(kind: int, rows: int, head_dim: int, out: int) -> None:
    """Transpose K rows of 32 tokens into a panel.

    Args:
        kind: element kind of the cache.
        rows: address of the 32 rows' addresses.
        head_dim: even.
        out: the panel, with room for head_dim rounded up to 32.
    """
    num_words = head_dim // 2 if kind == BFLOAT16 else head_dim
    for word in range(0, num_words, LANES):
        count = num_words - word
        for group in range(2):
            target = out + word * _ROW_BYTES + 4 * LANES * group
            _transpose_words(rows + 8 * LANES * group, 4 * word, count, target)


@kernel
def pack_values(kind: int, rows: int, num_rows: int, v_head_dim: int, out: int, panel_bytes: int) -> None:
    """Copy V rows into panels.

    Args:
        kind: element kind of the cache.
        rows: address of the rows' addresses.
        num_rows: even.
        v_head_dim: width of a row.
        out: where these rows start in the first panel.
        panel_bytes: distance between panels.
    """
    for row in range(0, num_rows, 2):
        first, second = get_int64(rows + 8 * row), get_int64(rows + 8 * row + 8)
        for column in range(0, v_head_dim, PANEL):
            panel = out + column // PANEL * panel_bytes
            if kind == BFLOAT16:
                count = v_head_dim - column
                _interleave(first + 2 * column, second + 2 * column, count, panel + row // 2 * _ROW_BYTES)
            else:
                for half in range(0, PANEL, LANES):
                    at_half = panel + row * _ROW_BYTES + 4 * half
                    if column + half < v_head_dim:
                        store_float32(at_half, load(FLOAT32, first, column + half, v_head_dim))
                        store_float32(at_half + _ROW_BYTES, load(FLOAT32, second, column + half, v_head_dim))
