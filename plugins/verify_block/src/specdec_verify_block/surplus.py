"""S_i of the rule: how much of the target's law, scaled, exceeds the draft's; in plain torch, a few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.verify.laws import target_law

if TYPE_CHECKING:
    from specdec.sampling.backend import RowStatistics

_CHUNK_BYTES = 64 << 20


def surplus(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    statistics: RowStatistics,
    scale: Tensor,
    draft_probs: Tensor,
    nodes: Tensor,
) -> Tensor:
    """The sum over the vocabulary of ``max(scale * P - Q, 0)``.

    Args:
        logits: [R, V].
        rows: int64 [E], rows of the logits.
        temperature: float32 [E], above 0.
        statistics: of those rows.
        scale: float64 [E].
        draft_probs: float32 [N, V].
        nodes: int64 [E], rows of ``draft_probs``.

    Returns:
        float64 [E]; NaN where a row gives no token.
    """
    out = torch.empty_like(scale)
    step = max(1, _CHUNK_BYTES // (8 * max(logits.shape[1], 1)))
    for start in range(0, len(rows), step):
        some = torch.arange(start, min(start + step, len(rows)), device=rows.device)
        target = target_law(logits[rows[some]], statistics.at(some), temperature[some])
        out[some] = (scale[some, None] * target - draft_probs[nodes[some]]).clamp(min=0.0).sum(dim=-1)
    return out
