"""`surplus` compiled for CPUs: one pass over the logits and the draft's law of each row, nothing kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from specdec.sampling.cpu.bits import BLOCK, as_float, float_bits, float_from_bits

_LOG2_E = 1.0 / math.log(2.0)
_LOWEST = np.float32(-120.0)
"""Probabilities below 2**-120 count as that, which is nothing beside a float32 one."""
_ROUND = np.float32(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 to an integer, which its low bits then hold."""
_SERIES = tuple(np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(7))


@njit(inline="always")
def _power_of_two(x: Any) -> Any:
    """2**x for -126 <= x <= 126 to about 2e-7: the Taylor series about the nearest integer, and the integer itself."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    p = _SERIES[6]
    p = p * r + _SERIES[5]
    p = p * r + _SERIES[4]
    p = p * r + _SERIES[3]
    p = p * r + _SERIES[2]
    p = p * r + _SERIES[1]
    p = p * r + _SERIES[0]
    return p * float_from_bits(np.int32((float_bits(shifted) + np.int32(127)) << np.int32(23)))


@njit(inline="always")
def _surplus(row: Any, per_bit: Any, largest: Any, weight: Any, drafted: Any, weights: Any) -> Any:
    """The sum of ``max(weight * 2**((logit - largest) * per_bit) - drafted, 0)``; terms in float32."""
    for i in range(BLOCK):
        weights[i] = 0.0
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        other = drafted[start : start + BLOCK]
        for i in range(block.shape[0]):
            mass = _power_of_two(max((as_float(block[i]) - largest) * per_bit, _LOWEST))
            weights[i] += max(weight * mass - other[i], np.float32(0.0))
    total = 0.0
    for i in range(BLOCK):
        total += np.float64(weights[i])
    return total


_SIGNATURE = (
    "void({}[:,::1], int64[::1], float32[::1], float64[::1], int64[::1], float64[::1], float32[:,::1], int64[::1], "
    "float64[::1])"
)


@njit(
    [_SIGNATURE.format("float32"), _SIGNATURE.format("uint16")],
    cache=True,
    nogil=True,
    error_model="numpy",
    fastmath={"contract"},
)
def add_surplus(
    logits: Any,
    rows: Any,
    temperature: Any,
    log_normalizers: Any,
    tokens: Any,
    scale: Any,
    draft_probs: Any,
    nodes: Any,
    out: Any,
) -> None:
    """Write each entry's sum into ``out``; arguments as for `specdec_verify_block.surplus.surplus`.

    ``tokens`` is int64 [E], the first largest logit of each row.
    """
    weights = np.empty(BLOCK, dtype=np.float32)
    for e in range(rows.shape[0]):
        if np.isnan(log_normalizers[e]):
            out[e] = np.nan
            continue
        row = logits[rows[e]]
        heat = np.float64(temperature[e])
        largest = as_float(row[tokens[e]])
        # The largest token's probability, so that the distances from it keep their precision.
        share = math.exp(np.float64(largest) / heat - log_normalizers[e])
        out[e] = _surplus(
            row,
            np.float32(_LOG2_E / heat),
            largest,
            np.float32(scale[e] * share),
            draft_probs[nodes[e]],
            weights,
        )
