"""Sampling in plain torch: the reference, and the path of devices without a backend of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling import noise
from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.noise import Purpose
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT


class TorchSampling(SamplingBackend):
    """See `SamplingBackend`; float64, a few rows at a time."""

    name = "torch"
    priority = 0

    def supports(self, device: str) -> list[str]:
        """Serves every device that torch has."""
        return []

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
        logits = logits if rows is None else logits[rows]
        tokens = _largest(logits)
        random = temperature > 0
        drawn, score = noise.race(logits, temperature.where(random, 1.0), seeds, positions, purpose)
        fault = random & (score.isnan() | (score == torch.inf))
        return torch.where(random & (tokens >= 0), drawn, tokens).masked_fill(fault, NAN_LOGITS)

    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        """See `SamplingBackend.statistics`."""
        logits = logits if rows is None else logits[rows]
        tokens = _largest(logits)
        random = temperature > 0
        log_normalizers = (logits.double() / temperature.where(random, 1.0).double()[:, None]).logsumexp(dim=-1)
        largest = logits.double().gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        log_normalizers = torch.where(random, log_normalizers, largest)
        fault = (tokens == NAN_LOGITS) | (random & (largest == torch.inf))
        nothing = fault | (tokens == NO_TOKEN_LEFT)
        return RowStatistics(
            log_normalizers=log_normalizers.masked_fill(nothing, torch.nan),
            tokens=tokens.masked_fill(fault, NAN_LOGITS),
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
        rows = torch.arange(len(token_ids), device=logits.device) if rows is None else rows
        is_token = (token_ids >= 0) & (token_ids < logits.shape[1])
        tokens = token_ids.where(is_token, 0)
        random = temperature > 0
        scaled = logits[rows, tokens].double() / temperature.where(random, 1.0).double()
        target = (scaled - statistics.log_normalizers).exp()
        drafted = torch.ones_like(target)
        if draft_probs is not None:
            draft_rows = torch.arange(len(rows), device=rows.device) if draft_rows is None else draft_rows
            given = draft_probs[draft_rows.clamp(min=0), tokens].double()
            drafted = torch.where(draft_rows >= 0, given, drafted)
        uniform = noise.uniforms(seeds, positions, 1, purpose)[:, 0]
        accepted = (uniform * drafted <= target) & (drafted > 0)
        return is_token & torch.where(random, accepted, tokens == statistics.tokens)

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
        logits = logits if rows is None else logits[rows]
        plain = self.draw(logits, temperature, seeds, positions, purpose)
        random = temperature > 0
        scaled = logits.double() / temperature.where(random, 1.0).double()[:, None]
        weights = (scaled - statistics.log_normalizers[:, None]).exp()
        one_hot = torch.ones_like(random)
        if draft_probs is not None:
            draft_rows = torch.arange(len(rejected), device=logits.device) if draft_rows is None else draft_rows
            one_hot = draft_rows < 0
            given = draft_probs[draft_rows.clamp(min=0)].double().masked_fill(one_hot[:, None], 0.0)
            weights = (weights - given).clamp(min=0.0)
        removed = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, rejected.clamp(min=0)[:, None], True)
        weights = weights.masked_fill(removed & one_hot[:, None], 0.0)
        scores, winners = (weights / noise.exponentials(seeds, positions, logits.shape[1], purpose)).max(dim=-1)
        usable = random & (rejected >= 0) & (plain >= 0) & (scores > 0)
        return torch.where(usable, winners, plain)


def _largest(logits: Tensor) -> Tensor:
    """int64 [E]: the first index of the largest logit of each row, or a code."""
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    return tokens.masked_fill(best == -torch.inf, NO_TOKEN_LEFT).masked_fill(best.isnan(), NAN_LOGITS)
