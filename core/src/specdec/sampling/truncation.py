"""min-p, top-k and top-p: keep only the most likely tokens of a row, in this order.

With the tokens ranked by logit, the lower token id first among equals, and ``d = (logit - largest) / temperature``:

* min-p keeps a token when ``d >= log(min_p)``;
* top-k keeps the first k of those;
* top-p keeps, with probabilities normalised over what is left, the shortest prefix whose mass reaches ``top_p``: a
  token stays when the mass before it is below ``top_p - 1e-6`` (the margin makes sums that should be equal come out
  equal), and the first one always does.

What is dropped becomes -inf; what is kept stays as it was, not divided by the temperature. Rows of requests without
these options, rows with NaN or +inf, and rows without any token left are not touched. Nothing depends on other rows.

This is the definition in torch, for any device, without host synchronisation. `specdec.sampling.cpu.truncate` does the
same without sorting the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.ranking import first_ranked
from specdec.sampling.rows import StepRows

if TYPE_CHECKING:
    import numpy as np

    from specdec.sampling.batch import SamplingBatch

MASS_MARGIN = 1e-6
_CHUNK_BYTES = 64 << 20


class Truncation:
    """The stage of the pipeline."""

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for."""
        return batch.truncated

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        rows = step.rows_of_all(step.batch.truncated)
        if logits.device.type == "cpu":
            _truncate_on_cpu(logits, step, rows)
        else:
            truncate_rows(logits, step, rows)

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""


def _truncate_on_cpu(logits: Tensor, step: StepRows, rows: np.ndarray) -> None:
    from specdec.sampling.cpu import KERNELS

    batch = step.batch
    KERNELS.function("truncate_rows")(
        logits.numpy(),
        rows,
        step.layout.request_index.numpy(),
        batch.temperature.numpy(),
        batch.top_k.numpy(),
        batch.top_p.numpy(),
        batch.log_min_p.numpy(),
        MASS_MARGIN,
    )


def truncate_rows(logits: Tensor, step: StepRows, rows: np.ndarray) -> None:
    """The definition, in plain torch.

    Args:
        logits: float32 [R, V], changed in place.
        step: the step's rows.
        rows: int64 [P], the rows to change; their temperature is above 0.
    """
    batch = step.batch
    index = torch.from_numpy(rows).to(logits.device)
    chunk = max(1, _CHUNK_BYTES // (8 * logits.shape[1]))
    for start in range(0, len(rows), chunk):
        part = index[start : start + chunk]
        request = step.layout.request_index[part]
        logits[part] = _truncated(
            logits[part],
            batch.temperature[request, None].double(),
            batch.top_k[request, None],
            batch.top_p[request, None],
            batch.log_min_p[request, None],
            batch.max_top_k,
        )


def _truncated(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, max_top_k: int
) -> Tensor:
    vocab_size = logits.shape[1]
    if 0 < max_top_k < vocab_size:
        # No row needs more than its first max_top_k tokens, so the vocabulary need not be sorted.
        ranked, tokens = first_ranked(logits, max_top_k)
    else:
        ranked, tokens = logits.sort(dim=-1, descending=True, stable=True)
    largest = ranked[:, :1]
    distance = (ranked.double() - largest.double()) / temperature
    keep = distance >= log_min_p
    rank = torch.arange(ranked.shape[1], device=logits.device)
    keep &= (top_k == 0) | (rank < top_k)
    mass = distance.exp().masked_fill(~keep, 0.0)
    before = mass.cumsum(dim=-1) - mass
    keep &= (before < (top_p - MASS_MARGIN) * mass.sum(dim=-1, keepdim=True)) | (top_p >= 1) | (rank == 0)
    kept = torch.full_like(logits, -torch.inf).scatter_(1, tokens, ranked.masked_fill(~keep, -torch.inf))
    return torch.where(largest.isfinite(), kept, logits)
