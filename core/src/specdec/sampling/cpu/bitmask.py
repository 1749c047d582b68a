"""Grammar masks applied to rows of logits in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import compiled

_FORBIDDEN = np.float32(-np.inf)


@compiled("void(float32[:,::1], int64[::1], int32[:,::1])")
def apply_bitmask(logits: Any, rows: Any, masks: Any) -> None:
    """Set forbidden tokens to -inf.

    Args:
        logits: float32 [R, V], changed in the rows named.
        rows: int64 [M]: which row each mask is for.
        masks: int32 [M, ceil(V / 32)]: bit ``t % 32`` of word ``t // 32`` allows token t.
    """
    vocab_size = logits.shape[1]
    for i in range(rows.shape[0]):
        row = logits[rows[i]]
        for w in range(masks.shape[1]):
            word = masks[i, w]
            if word == -1:
                continue
            span = row[w * 32 : min(w * 32 + 32, vocab_size)]
            if word == 0:
                for j in range(span.shape[0]):
                    span[j] = _FORBIDDEN
            else:
                for j in range(span.shape[0]):
                    span[j] = span[j] if (word >> j) & 1 else _FORBIDDEN
