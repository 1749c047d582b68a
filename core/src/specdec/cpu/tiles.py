"""The inner loop of matrix products: a few rows times a panel of 32 columns, accumulated in registers.

Packed matrices (weights, and K/V tiles in attention) are panels of 32 columns; rows come in pairs::

    bfloat16   [panels][rows / 2][32][2]    a column's two values share a 32-bit word
    float32    [panels][rows][32]

The left operand is float32. bfloat16 words are split into two float32 by a shift and a mask, which costs less than the
bfloat16 dot-product instruction of AVX-512 (one per two cycles where this was measured, against two float32
multiply-adds per cycle) and is exact. Each output is one chain of fused multiply-adds over the rows in order, so that
it does not depend on how many rows are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.compile import native
from specdec.cpu.features import MAX_ROWS, WHOLE_ROWS
from specdec.cpu.layout import BFLOAT16, LANES, PANEL, TEAM_TILE_ENTRY
from specdec.cpu.simd import F32, I32, I64, POINTER, V16F, V16I, at, function, get_int64, kernel, splat

_VECTORS = PANEL // LANES

AHEAD_BYTES = 8192
"""How far ahead of its use a weight is prefetched when it is used once."""


def _offset(builder: Any, address: Any, *terms: Any) -> Any:
    for term in terms:
        address = builder.add(address, I64(term) if isinstance(term, int) else term)
    return address


def _weights(builder: Any, kind: int, row_pair: Any, vectors: Sequence[int]) -> list[list[Any]]:
    """Some of the vectors of both rows of a pair as float32: [2][vectors]."""

    def read(offset: int, vector: Any) -> Any:
        return builder.load(at(builder, _offset(builder, row_pair, offset)), align=64, typ=vector)

    if kind != BFLOAT16:
        return [[read(4 * (PANEL * half + LANES * v), V16F) for v in vectors] for half in range(2)]
    words = [read(4 * LANES * v, V16I) for v in vectors]
    first = [builder.shl(word, ir.Constant(V16I, [16] * LANES)) for word in words]
    second = [builder.and_(word, ir.Constant(V16I, [0xFFFF0000] * LANES)) for word in words]
    return [[builder.bitcast(word, V16F) for word in half] for half in (first, second)]


def _prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    prefetch = function(builder, "llvm.prefetch.p0", ir.VoidType(), [POINTER, I32, I32, I32])
    for line in range(0, num_bytes, 64):
        builder.call(prefetch, [at(builder, _offset(builder, address, line)), I32(0), I32(3), I32(1)])


def _generate(builder: Any, kind: int, num_rows: int, args: Any) -> None:
    """All columns in one pass over the panel, or one vector of them at a time."""
    *rest, ahead, ahead_step = args
    num_pairs = args[3]
    if num_rows <= WHOLE_ROWS:
        _generate_pass(builder, kind, num_rows, range(_VECTORS), (*rest, ahead, ahead_step))
        return
    step = builder.sdiv(ahead_step, I64(_VECTORS))
    for vector in range(_VECTORS):
        begin = _offset(builder, ahead, builder.mul(step, builder.mul(num_pairs, I64(vector))))
        _generate_pass(builder, kind, num_rows, [vector], (*rest, begin, step))


def _generate_pass(builder: Any, kind: int, num_rows: int, vectors: Sequence[int], args: Any) -> None:
    left, left_stride, panel, num_pairs, out, out_stride, ahead, ahead_step = args
    multiply_add = function(builder, "llvm.fma.v16f32", V16F, [V16F] * 3)
    rows = [_offset(builder, left, builder.mul(left_stride, I64(row))) for row in range(num_rows)]
    pair_bytes = PANEL * (4 if kind == BFLOAT16 else 8)

    entry, loop = builder.block, builder.append_basic_block("pairs")
    done = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    sums = [[builder.phi(V16F) for _ in vectors] for _ in rows]
    current = [list(row) for row in sums]
    row_pair = _offset(builder, panel, builder.mul(pair, I64(pair_bytes)))
    _prefetch(builder, _offset(builder, ahead, builder.mul(pair, ahead_step)), pair_bytes * len(vectors) // _VECTORS)
    for half, weights in enumerate(_weights(builder, kind, row_pair, vectors)):
        for row, address in enumerate(rows):
            element = _offset(builder, address, builder.shl(pair, I64(3)), 4 * half)
            value = splat(builder, builder.load(at(builder, element), align=4, typ=F32), V16F)
            for v, weight in enumerate(weights):
                current[row][v] = builder.call(multiply_add, [value, weight, current[row][v]])
    following = builder.add(pair, I64(1))
    pair.add_incoming(I64(0), entry)
    pair.add_incoming(following, loop)
    for old_row, new_row in zip(sums, current, strict=True):
        for old, new in zip(old_row, new_row, strict=True):
            old.add_incoming(ir.Constant(V16F, None), entry)
            old.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, done)

    builder.position_at_end(done)
    for row, values in enumerate(current):
        for v, value in zip(vectors, values, strict=True):
            target = _offset(builder, out, builder.mul(out_stride, I64(row)), 4 * LANES * v)
            builder.store(value, at(builder, target), align=4)


@intrinsic
def _tile(
    _context: Any,
    kind: Any,
    rows: Any,
    left: Any,
    stride: Any,
    panel: Any,
    pairs: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """A switch over (kind, number of rows) with one generated loop per case."""

    def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        kind_value, rows_value, *rest = args
        end = builder.append_basic_block("end")
        case = builder.add(builder.mul(kind_value, I64(MAX_ROWS + 1)), rows_value)
        switch = builder.switch(case, end)
        for kind_case in (0, 1):
            for num_rows in range(1, MAX_ROWS + 1):
                block = builder.append_basic_block(f"kind{kind_case}_rows{num_rows}")
                switch.add_case(I64(kind_case * (MAX_ROWS + 1) + num_rows), block)
                builder.position_at_end(block)
                _generate(builder, kind_case, num_rows, rest)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 10), generate


@native(*[types.intp] * 10)
def tile_entry(
    kind: int,
    num_rows: int,
    left: int,
    stride: int,
    panel: int,
    num_pairs: int,
    out: int,
    out_stride: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """`tile` as a function of its own, so that regions need not contain its many loops."""
    _tile(kind, num_rows, left, stride, panel, num_pairs, out, out_stride, ahead, ahead_step)


@intrinsic
def _call_entry(
    _context: Any,
    entry: Any,
    kind: Any,
    rows: Any,
    left: Any,
    stride: Any,
    panel: Any,
    pairs: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
    step: Any,
) -> Any:
    def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        kind_of_entry = ir.FunctionType(ir.VoidType(), [I64] * 10)
        builder.call(builder.inttoptr(args[0], ir.PointerType(kind_of_entry)), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11), generate


@kernel
def tile(
    team: int,
    kind: int,
    num_rows: int,
    left: int,
    stride: int,
    panel: int,
    num_pairs: int,
    out: int,
    out_stride: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """Multiply ``num_rows`` rows by one panel.

    Args:
        team: of the region; it knows where `tile_entry` is.
        kind: of the panel.
        num_rows: 1 .. MAX_ROWS.
        left: address of float32 [num_rows, 2 * num_pairs], rows ``stride`` bytes apart.
        stride: bytes.
        panel: address of the packed panel.
        num_pairs: half the number of the panel's rows, at least 1.
        out: address of float32 [num_rows, 32], rows ``out_stride`` bytes apart; overwritten.
        out_stride: bytes.
        ahead: address to prefetch from, any.
        ahead_step: bytes by which that address advances with each pair of rows.
    """
    entry = get_int64(team + TEAM_TILE_ENTRY)
    _call_entry(entry, kind, num_rows, left, stride, panel, num_pairs, out, out_stride, ahead, ahead_step)


@kernel
def num_tiles(rows: int) -> int:
    """Into how many tiles ``rows`` rows are split; tile i starts at row ``share(rows, i, num_tiles(rows))``."""
    return (rows + MAX_ROWS - 1) // MAX_ROWS
