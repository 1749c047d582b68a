"""The token after the accepted draft tokens: recovered from the residual, or the bonus token from the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.noise import Purpose
from specdec.sampling.sampler import backend_of

if TYPE_CHECKING:
    from specdec.sampling.backend import RowStatistics
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Rows


def last_tokens(
    rows: Rows,
    sampling: SamplingBatch,
    row: Tensor,
    rejected: Tensor,
    statistics: RowStatistics,
    draft_probs: Tensor | None,
    draft_rows: Tensor,
) -> Tensor:
    """Draw the last token of each request.

    Args:
        rows: the step's rows.
        sampling: the requests' temperatures and seeds.
        row: int64 [B], the row of each request's last token.
        rejected: int64 [B], the draft token that was rejected there. The token then comes from what its rejection
            leaves, with the noise of `Purpose.RECOVER`. -1: nothing was rejected, and the token is the ordinary
            sample of the row, with the noise of `Purpose.SAMPLE`.
        statistics: of those rows, where something was rejected.
        draft_probs: float32 [N, V], laws of draft tokens; None when all are one-hot.
        draft_rows: int64 [B], the row of ``draft_probs`` of each rejected draft token.

    Returns:
        int64 [B]: tokens, or the codes of `specdec.sampling.outcome`.
    """
    backend = backend_of(rows.logits.device.type)
    last = torch.empty_like(row)
    for recovers in (True, False):
        some = _which((rejected >= 0) == recovers)
        if len(some) == 0:
            continue
        keys = (sampling.temperature[some], sampling.seeds[some], rows.positions[row[some]])
        if recovers:
            drawn = backend.recover(
                rows.logits,
                statistics.at(some),
                rejected[some],
                *keys,
                draft_probs=draft_probs,
                draft_rows=draft_rows[some],
                rows=row[some],
            )
        else:
            drawn = backend.draw(rows.logits, *keys, Purpose.SAMPLE, rows=row[some])
        last[some] = torch.where((rejected[some] >= 0) == recovers, drawn, last[some])
    return last


def _which(mask: Tensor) -> Tensor:
    """int64: where ``mask`` is true; on devices, which must not be asked, all of its indices."""
    return mask.nonzero()[:, 0] if mask.device.type == "cpu" else torch.arange(len(mask), device=mask.device)
