"""Vectors of 16 float32 lanes and raw memory for numba functions.

Kernels work on addresses (``intp``) rather than arrays, because they run inside OpenMP regions over memory owned by
torch. A `Vec` lowers to LLVM's ``<16 x float>``: one register with AVX-512, two with AVX2, four on NEON. Arithmetic is
written with the usual operators; ``fma`` is explicit, so results do not depend on what the compiler chooses to
contract.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from specdec.cpu.layout import BFLOAT16, LANES


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator of functions that other kernels call; `specdec.cpu.compile` makes entry points.

    Args:
        function: used without parentheses.
        options: of ``njit``, such as ``fastmath``.
    """
    return njit(function, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


inlined = kernel(forceinline=True)
"""Decorator of small functions and those with one call, which LLVM copies into their callers.

numba's own ``inline="always"`` copies before types are known, which takes many times as long to compile.
"""

F32 = ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
V16F, V16I, V16H = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
POINTER = ir.PointerType()


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vec16xFloat32")


Vec = _VecType()


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V16F)


def function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Declare an LLVM function in the module being built."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def at(builder: Any, address: Any) -> Any:
    """The pointer for an integer address."""
    return builder.inttoptr(address, POINTER)


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector with ``scalar`` in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, vector.count), None))


def widen(builder: Any, halves: Any) -> Any:
    """16 bfloat16 bit patterns [i16] -> 16 float32."""
    words = builder.zext(halves, V16I)
    return builder.bitcast(builder.shl(words, _all(16)), V16F)


def _rounded_bits(builder: Any, value: Any) -> Any:
    """Bits of 16 float32 [i32] with the nearest bfloat16 (ties to even) in the upper halves; NaN stays NaN."""
    bits = builder.bitcast(value, V16I)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    nearest = builder.add(bits, builder.add(odd, _all(0x7FFF)))
    return builder.select(builder.fcmp_unordered("uno", value, value), builder.or_(bits, _all(1 << 22)), nearest)


def _all(word: int) -> Any:
    return ir.Constant(V16I, [word] * LANES)


def _narrow(builder: Any, value: Any) -> Any:
    """16 float32 -> the bit patterns of the nearest bfloat16 [i16]."""
    return builder.trunc(builder.lshr(_rounded_bits(builder, value), _all(16)), V16H)


def _lanes_below(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(V16I, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), V16I))


def _unary(build: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def op(_context: Any, a: Any) -> Any:
        return Vec(Vec), lambda _c, builder, _s, args: build(builder, args[0])

    return op


def _binary(build: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def op(_context: Any, a: Any, b: Any) -> Any:
        return Vec(Vec, Vec), lambda _c, builder, _s, args: build(builder, *args)

    return op


def _call(builder: Any, name: str, *args: Any) -> Any:
    return builder.call(function(builder, name, V16F, [V16F] * len(args)), list(args))


_add = _binary(lambda b, x, y: b.fadd(x, y))
_sub = _binary(lambda b, x, y: b.fsub(x, y))
_mul = _binary(lambda b, x, y: b.fmul(x, y))
_div = _binary(lambda b, x, y: b.fdiv(x, y))
vmax = _binary(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
vmin = _binary(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
round_nearest = _unary(lambda b, x: _call(b, "llvm.rint.v16f32", x))
to_bfloat16 = _unary(lambda b, x: b.bitcast(b.and_(_rounded_bits(b, x), _all(0xFFFF0000)), V16F))
"""The nearest bfloat16 values, as float32."""


def _overload_operator(op: Any, implementation: Any) -> None:
    @overload(op, strict=False)
    def implement(a: Any, b: Any) -> Any:
        if a is Vec and b is Vec:
            return lambda a, b: implementation(a, b)
        return None


for _op, _implementation in (
    (operator.add, _add),
    (operator.sub, _sub),
    (operator.mul, _mul),
    (operator.truediv, _div),
):
    _overload_operator(_op, _implementation)


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    return Vec(Vec, Vec, Vec), lambda _c, builder, _s, args: _call(builder, "llvm.fma.v16f32", *args)


@intrinsic
def broadcast(_context: Any, value: Any) -> Any:
    """A vector with the float32 ``value`` in every lane."""
    return Vec(types.float32), lambda _c, builder, _s, args: splat(builder, args[0], V16F)


@intrinsic
def power_of_two(_context: Any, exponent: Any) -> Any:
    """2 ** exponent for integral exponents in -126 .. 127."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        whole = builder.add(builder.fptosi(args[0], V16I), _all(127))
        return builder.bitcast(builder.shl(whole, _all(23)), V16F)

    return Vec(Vec), generate


@intrinsic
def _first_lane(_context: Any, a: Any) -> Any:
    return types.float32(Vec), lambda _c, builder, _s, args: builder.extract_element(args[0], ir.Constant(I32, 0))


def _halving(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """A reduction over the lanes in the fixed order (i, i + 8), (i, i + 4), …"""

    @intrinsic
    def op(_context: Any, a: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            value, width = args[0], LANES
            while width > 1:
                width //= 2
                low, high = (
                    builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, width), list(half)))
                    for half in (range(width), range(width, 2 * width))
                )
                value = combine(builder, low, high)
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(Vec), generate

    return op


sum_lanes = _halving(lambda b, x, y: b.fadd(x, y))
max_lanes = _halving(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


def _loader(words: Any, convert: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Intrinsics that load 16 elements, and only the first ``count``."""

    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            return convert(builder, builder.load(at(builder, args[0]), align=words.element.width // 8, typ=words))

        return Vec(types.intp), generate

    @intrinsic
    def load_some(_context: Any, address: Any, count: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            bits = words.element.width
            mask = _lanes_below(builder, args[1])
            kind = f"llvm.masked.load.v16i{bits}.p0"
            masked = function(builder, kind, words, [POINTER, I32, mask.type, words])
            zeros = ir.Constant(words, None)
            return convert(builder, builder.call(masked, [at(builder, args[0]), I32(bits // 8), mask, zeros]))

        return Vec(types.intp, types.intp), generate

    return load, load_some


def _storer(words: Any, convert: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Intrinsics that store 16 lanes, and only the first ``count``."""

    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            builder.store(convert(builder, args[1]), at(builder, args[0]), align=words.element.width // 8)
            return context.get_dummy_value()

        return types.void(types.intp, Vec), generate

    @intrinsic
    def store_some(_context: Any, address: Any, value: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            bits = words.element.width
            mask = _lanes_below(builder, args[2])
            kind = f"llvm.masked.store.v16i{bits}.p0"
            masked = function(builder, kind, ir.VoidType(), [words, POINTER, I32, mask.type])
            builder.call(masked, [convert(builder, args[1]), at(builder, args[0]), I32(bits // 8), mask])
            return context.get_dummy_value()

        return types.void(types.intp, Vec, types.intp), generate

    return store, store_some


load_float32, _load_some_float32 = _loader(V16I, lambda b, words: b.bitcast(words, V16F))
load_bfloat16, _load_some_bfloat16 = _loader(V16H, widen)
store_float32, _store_some_float32 = _storer(V16I, lambda b, value: b.bitcast(value, V16I))
store_bfloat16, _store_some_bfloat16 = _storer(V16H, _narrow)


@kernel
def load(kind: int, address: int, index: int, end: int) -> Any:
    """Elements ``index .. index + 15`` of an array of ``kind`` at ``address``; 0 from ``end`` on."""
    count = end - index
    if kind == BFLOAT16:
        if count >= LANES:
            return load_bfloat16(address + 2 * index)
        return _load_some_bfloat16(address + 2 * index, count)
    if count >= LANES:
        return load_float32(address + 4 * index)
    return _load_some_float32(address + 4 * index, count)


@kernel
def store(kind: int, address: int, index: int, end: int, value: Any) -> None:
    """Write elements ``index .. index + 15`` of an array of ``kind`` at ``address``, none from ``end`` on."""
    count = end - index
    if kind == BFLOAT16:
        if count >= LANES:
            store_bfloat16(address + 2 * index, value)
        else:
            _store_some_bfloat16(address + 2 * index, value, count)
    elif count >= LANES:
        store_float32(address + 4 * index, value)
    else:
        _store_some_float32(address + 4 * index, value, count)


@kernel
def rounded(kind: int, value: Any) -> Any:
    """``value`` as memory of ``kind`` would keep it."""
    if kind == BFLOAT16:
        return to_bfloat16(value)
    return value


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Bring the cache line at an address closer, whatever the address."""

    def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        fetch = function(builder, "llvm.prefetch.p0", ir.VoidType(), [POINTER, I32, I32, I32])
        builder.call(fetch, [at(builder, args[0]), I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _scalar(word: Any, numba_type: Any) -> tuple[Any, Any]:
    align = 1 if word is I8 else 4

    @intrinsic
    def get(_context: Any, address: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            return builder.load(at(builder, args[0]), align=align, typ=word)

        return numba_type(types.intp), generate

    @intrinsic
    def put(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
            builder.store(args[1], at(builder, args[0]), align=align)
            return context.get_dummy_value()

        return types.void(types.intp, numba_type), generate

    return get, put


get_float32, put_float32 = _scalar(F32, types.float32)
get_int32, put_int32 = _scalar(I32, types.int32)
get_int64, put_int64 = _scalar(I64, types.int64)
get_byte, put_byte = _scalar(I8, types.uint8)


def _word(element: Any, numba_type: Any) -> Any:
    @intrinsic
    def read(_context: Any, block: Any, name: Any) -> Any:
        def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
            offset = builder.shl(args[1], I64(3))
            return builder.load(at(builder, builder.add(args[0], offset)), align=4, typ=element)

        return (numba_type(types.intp, name), generate) if isinstance(name, types.IntEnumMember) else None

    return read


word = _word(I64, types.intp)
"""The int64 word of an argument block that an IntEnum member names."""
float_word = _word(F32, types.float32)
"""The same for a float32 in the low half of the word."""

_f = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _f(1.44269504088896341), _f(0.693359375), _f(-2.12194440e-4)
_EXP_MIN, _EXP_MAX = _f(-87.0), _f(88.0)
_P0, _P1, _P2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_P3, _P4, _P5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)
_ONE, _TWO = _f(1.0), _f(2.0)


@kernel
def exp(x: Any) -> Any:
    """e ** x to about 1e-7 relative (polynomial of the Cephes library); arguments below -87 give 0."""
    bounded = vmin(vmax(x, broadcast(_EXP_MIN)), broadcast(_EXP_MAX))
    n = round_nearest(bounded * broadcast(_LOG2E))
    r = fma(n, broadcast(-_LN2_HIGH), bounded)
    r = fma(n, broadcast(-_LN2_LOW), r)
    p = fma(broadcast(_P0), r, broadcast(_P1))
    p = fma(p, r, broadcast(_P2))
    p = fma(p, r, broadcast(_P3))
    p = fma(p, r, broadcast(_P4))
    p = fma(p, r, broadcast(_P5))
    p = fma(p, r * r, r + broadcast(_ONE))
    return zero_below(x, _EXP_MIN, p * power_of_two(n))


@kernel
def scalar_exp(x: float) -> float:
    """`exp` of one float32."""
    return _first_lane(exp(broadcast(x)))


@intrinsic
def zero_below(_context: Any, x: Any, bound: Any, value: Any) -> Any:
    """``value`` where ``x`` >= ``bound``, 0 elsewhere."""

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        keep = builder.fcmp_ordered(">=", args[0], splat(builder, args[1], V16F))
        return builder.select(keep, args[2], ir.Constant(V16F, None))

    return Vec(Vec, types.float32, Vec), generate


@kernel
def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x)."""
    one = broadcast(_ONE)
    return one / (one + exp(broadcast(_f(0.0)) - x))


@kernel
def tanh(x: Any) -> Any:
    """Hyperbolic tangent, to about 1e-7 absolute."""
    two = broadcast(_TWO)
    return two * sigmoid(two * x) - broadcast(_ONE)
