"""Bit-level views of floats inside compiled loops.

All loops here are written for LLVM's vectoriser: over a slice with an index from 0 (numba's wrap-around of
negative indices prevents it otherwise), with int32 reductions kept int32 by casts, and without branches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec.cpu.simd import inlined

SIGN = np.int32(0x7FFFFFFF)
INFINITY_BITS = np.int32(0x7F800000)
LOWEST_KEY = np.int32(-0x7FFFFFFF - 1)


@intrinsic
def as_float(typing_context: Any, value: Any) -> Any:
    """float32 as it is; uint16 as the bfloat16 with these bits."""
    if value == types.float32:
        return types.float32(types.float32), lambda context, builder, signature, args: args[0]

    def widen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(types.uint16), widen


@intrinsic
def float_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), bitcast


@intrinsic
def float_from_bits(typing_context: Any, value: Any) -> Any:
    """The float32 with the bits of an int32."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), bitcast


@intrinsic
def double_from_bits(typing_context: Any, value: Any) -> Any:
    """The float64 with the bits of an int64."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), bitcast


@intrinsic
def double_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float64 as int64."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), bitcast


@inlined
def order_key(value: Any) -> Any:
    """An int32 that orders like the float32: equal for -0 and 0, above that of +inf for a positive NaN."""
    bits = float_bits(value)
    magnitude = np.int32(bits & SIGN)
    return np.int32(-magnitude) if bits < 0 else magnitude


@inlined
def magnitude_bits(value: Any) -> Any:
    """The float32's bits without the sign; above `INFINITY_BITS` for every NaN."""
    return np.int32(float_bits(value) & SIGN)
