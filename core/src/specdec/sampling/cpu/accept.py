"""The decision on draft tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from specdec.sampling.cpu.choose import philox

_SHIFT = np.uint64(32)


@njit(
    "void(float64[::1], int64[::1], int64[::1], float64[::1], float32[::1], int64[::1], int64[::1], uint32, "
    "float32[:,::1], int64[::1], boolean[::1])",
    cache=True,
    nogil=True,
)
def accept_tokens(
    logits: Any,
    token_ids: Any,
    largest: Any,
    log_normalizers: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    purpose: Any,
    draft_probs: Any,
    draft_rows: Any,
    out: Any,
) -> None:
    """See `specdec.sampling.backend.SamplingBackend.accept`.

    Args:
        logits: [E], those of the draft tokens.
        token_ids: [E], -1 for what is no token.
        largest: [E], the first largest token of each row.
        log_normalizers: [E].
        temperature: [E].
        seeds: [E].
        positions: [E].
        purpose: the noise stream.
        draft_probs: [N, V].
        draft_rows: [E], -1 for one-hot drafts.
        out: [E].
    """
    zero = np.uint32(0)
    for e in range(logits.shape[0]):
        if token_ids[e] < 0:
            out[e] = False
        elif temperature[e] == 0:
            out[e] = token_ids[e] == largest[e]
        else:
            position, seed = np.uint64(positions[e]), np.uint64(seeds[e])
            p0, p1 = np.uint32(position), np.uint32(position >> _SHIFT)
            word, _, _, _ = philox(zero, p0, p1, purpose, np.uint32(seed), np.uint32(seed >> _SHIFT))
            uniform = (np.float64(word) + 0.5) * 2.0**-32
            target = math.exp(logits[e] / np.float64(temperature[e]) - log_normalizers[e])
            drafted = 1.0
            if draft_rows[e] >= 0:
                drafted = np.float64(draft_probs[draft_rows[e], token_ids[e]])
            out[e] = drafted > 0 and uniform * drafted <= target
