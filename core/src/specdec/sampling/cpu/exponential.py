"""exp and sums, from operations that vectorise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.cpu.simd import kernel
from specdec.sampling.cpu.bits import double_bits, double_from_bits, float_bits, float_from_bits

LOWEST_EXPONENT = -50.0
"""exp(-50) is nothing beside the largest token's 1, even a million times: below it a token counts as having no mass."""
_ROUND = 6755399441055744.0
"""1.5 * 2**52: adding it rounds a float64 to an integer, which its low bits then hold."""
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10

_ROUND32 = np.float32(12582912.0)
"""1.5 * 2**23, the same for float32."""
_LOG2_E32 = np.float32(1.44269504088896341)
_LN2_HIGH32, _LN2_LOW32 = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ONE = np.float32(1.0)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@kernel(fastmath={"contract"}, forceinline=True)
def exp32(x: Any) -> Any:
    """exp(x) of a float32 for -87 <= x <= 1 to about 1e-7 relative (polynomial of the Cephes library)."""
    shifted = x * _LOG2_E32 + _ROUND32
    n = shifted - _ROUND32
    r = (x - n * _LN2_HIGH32) - n * _LN2_LOW32
    p = _P0
    p = p * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    p = p * (r * r) + r + _ONE
    return p * float_from_bits(np.int32((float_bits(shifted) + np.int32(127)) << np.int32(23)))


@kernel(fastmath={"contract"}, forceinline=True)
def exp(x: Any) -> Any:
    """exp(x) for -700 <= x <= 1 to about 1e-14.

    x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, Cody and Waite 1980), and the Taylor series of exp(r) up to
    r**11.
    """
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    # The low bits of ``shifted`` are n; in the exponent's place, with its bias, they are the float64 2**n.
    return p * double_from_bits((double_bits(shifted) + np.int64(1023)) << np.int64(52))


@kernel(fastmath={"reassoc"})
def total_of(values: Any) -> Any:
    """The sum, in whatever order is fast."""
    total = 0.0
    for i in range(values.shape[0]):
        total += values[i]
    return total
