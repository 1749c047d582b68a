"""The decision on draft tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.cpu.compile import compiled
from specdec.cpu.simd import kernel
from specdec.sampling.cpu.choose import philox

_SHIFT = np.uint64(32)


@kernel
def uniform_at(seed: Any, position: Any, index: Any, purpose: Any) -> Any:
    """See `specdec.sampling.noise.uniform_at`."""
    p0, p1 = np.uint32(position), np.uint32(np.uint64(position) >> _SHIFT)
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> _SHIFT)
    w0, w1, w2, w3 = philox(np.uint32(index >> 2), p0, p1, purpose, k0, k1)
    pair = (w2, w3) if index & 2 else (w0, w1)
    return (np.float64(pair[1] if index & 1 else pair[0]) + 0.5) * 2.0**-32


@kernel
def stays(
    token: Any, logit: Any, largest: Any, normalizer: Any, temperature: Any, seed: Any, position: Any, index: Any,
    purpose: Any, drafted: Any,
) -> Any:  # fmt: skip
    """Whether a draft token of the vocabulary stays: its law gave it ``drafted``."""
    if temperature == 0:
        return token == largest
    uniform = uniform_at(seed, position, index, purpose)
    target = math.exp(np.float64(logit) / np.float64(temperature) - normalizer)
    return drafted > 0 and uniform * drafted <= target


@compiled(
    "void(float64[::1], int64[::1], int64[::1], float64[::1], float32[::1], int64[::1], int64[::1], uint32, "
    "float32[:,::1], int64[::1], boolean[::1])"
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
    for e in range(logits.shape[0]):
        if token_ids[e] < 0:
            out[e] = False
            continue
        drafted = 1.0
        if draft_rows[e] >= 0:
            drafted = np.float64(draft_probs[draft_rows[e], token_ids[e]])
        out[e] = stays(
            token_ids[e], logits[e], largest[e], log_normalizers[e], temperature[e], seeds[e], positions[e], 0,
            purpose, drafted,
        )  # fmt: skip
