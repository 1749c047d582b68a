"""`surplus` compiled for CPUs: one pass over the logits and the draft's law of each row, nothing kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specdec.sampling.cpu.bits import BLOCK, as_float
from specdec.sampling.cpu.exponential import exp, total_of

_LOWEST = -700.0
"""Probabilities below exp(-700) count as 0."""


@njit(inline="always")
def _surplus(row: Any, per_nat: Any, log_normalizer: Any, scale: Any, drafted: Any, weights: Any) -> Any:
    total = 0.0
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        other = drafted[start : start + BLOCK]
        for i in range(block.shape[0]):
            mass = exp(max(np.float64(as_float(block[i])) * per_nat - log_normalizer, _LOWEST))
            weights[i] = max(scale * mass - np.float64(other[i]), 0.0)
        total += total_of(weights[: block.shape[0]])
    return total


_SIGNATURE = (
    "void({}[:,::1], int64[::1], float32[::1], float64[::1], float64[::1], float32[:,::1], int64[::1], float64[::1])"
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
    scale: Any,
    draft_probs: Any,
    nodes: Any,
    out: Any,
) -> None:
    """Write each entry's sum into ``out``; arguments as for `specdec_verify_block.surplus.surplus`."""
    weights = np.empty(BLOCK, dtype=np.float64)
    for e in range(rows.shape[0]):
        if np.isnan(log_normalizers[e]):
            out[e] = np.nan
        else:
            out[e] = _surplus(
                logits[rows[e]],
                1.0 / np.float64(temperature[e]),
                log_normalizers[e],
                scale[e],
                draft_probs[nodes[e]],
                weights,
            )
