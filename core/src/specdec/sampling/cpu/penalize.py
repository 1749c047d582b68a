"""The penalties of `specdec.sampling.penalties` in one pass over each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import compiled
from specdec.cpu.simd import inlined, kernel

_ZERO = np.float32(0)
_SPAN = 32
"""Tokens whose states are looked at together: most have not been said, and stay as they are."""


@inlined
def _penalized(logit: Any, state: Any, repetition: Any, presence: Any, frequency: Any) -> Any:
    count = state >> np.int32(1)
    repeated = logit / repetition if logit > _ZERO else logit * repetition
    value = repeated if state > 0 else logit
    said_once = presence if count > 0 else _ZERO
    return np.float32(np.float32(value - np.float32(frequency * np.float32(count))) - said_once)


@kernel
def _penalize_said(row: Any, states: Any, repetition: Any, presence: Any, frequency: Any) -> None:
    for start in range(0, row.shape[0], _SPAN):
        span = states[start : start + _SPAN]
        said = np.int32(0)
        for i in range(span.shape[0]):
            said = np.int32(said | span[i])
        if said != 0:
            for i in range(span.shape[0]):
                if span[i] != 0:
                    row[start + i] = _penalized(row[start + i], span[i], repetition, presence, frequency)


@compiled(
    "void(float32[:,::1], int64[::1], int64[::1], int64[::1], int32[:,::1], int64[:,::1], float32[::1], float32[::1], "
    "float32[::1])"
)
def penalize_rows(
    logits: Any,
    rows: Any,
    request_index: Any,
    slot_of_row: Any,
    table: Any,
    drafted: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
) -> None:
    """Change the given rows in place.

    Args:
        logits: [R, V].
        rows: [P].
        request_index: [R].
        slot_of_row: [P] rows of ``table``.
        table: [slots, V] token states.
        drafted: [R, D] draft tokens before each row, nearest first, padded with -1.
        repetition: [B].
        presence: [B].
        frequency: [B].
    """
    depth = drafted.shape[1]
    raw = np.empty(depth, dtype=np.float32)
    for p in range(rows.shape[0]):
        row = logits[rows[p]]
        state = table[slot_of_row[p]]
        before = drafted[rows[p]]
        request = request_index[rows[p]]
        times_repeated, once, each = repetition[request], presence[request], frequency[request]
        for j in range(depth):
            if before[j] >= 0:
                raw[j] = row[before[j]]
        _penalize_said(row, state, times_repeated, once, each)
        for j in range(depth):
            if before[j] >= 0:
                times = 0
                for other in range(depth):
                    times += before[other] == before[j]
                said = np.int32(state[before[j]] + np.int32(2 * times))
                row[before[j]] = _penalized(raw[j], said, times_repeated, once, each)
