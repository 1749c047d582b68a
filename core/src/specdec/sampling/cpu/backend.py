"""Sampling on CPU cores: compiled kernels on torch's threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.codes import Purpose
from specdec.sampling.cpu import KERNELS
from specdec.sampling.cpu.calls import RowsCall, StepCall, array
from specdec.sampling.cpu.job import Job

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows, Verdict


class CpuSampling(SamplingBackend):
    """See `SamplingBackend`. Draws are exactly those of `TorchSampling`; normalizers are right to 1e-7."""

    name = "cpu"
    priority = 10

    def __init__(self) -> None:
        KERNELS.load()

    def supports(self, device: str) -> list[str]:
        """Serves CPUs."""
        return [] if device == "cpu" else [f"runs on the CPU, the engine on {device}"]

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int = Purpose.SAMPLE,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.draw`."""
        call = RowsCall(logits, rows, temperature, seeds, positions, purpose)
        call.run(KERNELS.address("choose_region"))
        return torch.from_numpy(call.winners())

    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        """See `SamplingBackend.statistics`."""
        call = RowsCall(logits, rows, temperature)
        call.run(KERNELS.address("normalize_region"))
        tokens = call.winners()
        return RowStatistics(
            log_normalizers=torch.from_numpy(call.log_normalizers(tokens)), tokens=torch.from_numpy(tokens)
        )

    def accept(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        token_ids: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        draft_probs: Tensor | None = None,
        draft_rows: Tensor | None = None,
        purpose: int = Purpose.ACCEPT,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.accept`."""
        count = len(token_ids)
        probs, prob_rows = _draft_laws(draft_probs, draft_rows, count)
        rows = torch.arange(count) if rows is None else rows
        is_token = (token_ids >= 0) & (token_ids < logits.shape[1])
        chosen = logits[rows, token_ids.where(is_token, 0)].double()
        accepted = np.empty(count, dtype=np.bool_)
        KERNELS.function("accept_tokens")(
            chosen.numpy(),
            array(token_ids.where(is_token, -1), np.int64),
            array(statistics.tokens, np.int64),
            array(statistics.log_normalizers, np.float64),
            array(temperature, np.float32),
            array(seeds, np.int64),
            array(positions, np.int64),
            int(purpose),
            probs,
            prob_rows,
            accepted,
        )
        return torch.from_numpy(accepted)

    def recover(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        rejected: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        draft_probs: Tensor | None = None,
        draft_rows: Tensor | None = None,
        purpose: int = Purpose.RECOVER,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.recover`."""
        count = len(rejected)
        probs, prob_rows = _draft_laws(draft_probs, draft_rows, count)
        rows = torch.arange(count) if rows is None else rows
        usable = (temperature > 0) & (rejected >= 0) & ~statistics.log_normalizers.isnan()
        chosen = usable.nonzero()[:, 0]
        tokens = torch.full((count,), -1, dtype=torch.int64)
        if len(chosen):
            call = RowsCall(logits, rows[chosen], temperature[chosen], seeds[chosen], positions[chosen], purpose)
            largest = logits[rows[chosen], statistics.tokens[chosen]]
            call.set(Job.LARGEST, array(largest.float(), np.float32))
            call.set(Job.NORMALIZERS, array(statistics.log_normalizers[chosen], np.float64))
            call.set(Job.PROBS, probs)
            call.set(Job.PROB_ROWS, prob_rows[chosen.numpy()])
            call.set(Job.EXCLUDED, np.where(prob_rows < 0, array(rejected, np.int64), -1)[chosen.numpy()])
            call.run(KERNELS.address("recover_region"))
            tokens[chosen] = torch.from_numpy(call.winners())
        plain = (tokens < 0).nonzero()[:, 0]
        if len(plain):
            tokens[plain] = self.draw(
                logits, temperature[plain], seeds[plain], positions[plain], purpose, rows=rows[plain]
            )
        return tokens

    def match(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """See `SamplingBackend.match`."""
        return StepCall(rows, draft, sampling).run(KERNELS.address("match_region"))

    def reject(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """See `SamplingBackend.reject`."""
        return StepCall(rows, draft, sampling).run(KERNELS.address("reject_region"))


def _draft_laws(draft_probs: Tensor | None, draft_rows: Tensor | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft's laws [N, V], and which of them each entry has; -1 for none."""
    if draft_probs is None:
        return np.empty((0, 0), dtype=np.float32), np.full(count, -1, dtype=np.int64)
    rows = np.arange(count) if draft_rows is None else array(draft_rows, np.int64)
    return np.ascontiguousarray(draft_probs.float().numpy()), rows
