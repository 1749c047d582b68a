"""Proposers that draw their draft tokens from a law: one that reports it, and one that reports another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.drafting.base import Proposer
from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.types import Draft, ProposerCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.types import ProposalInput


class LawProposer(Proposer):
    """Draws as many draft tokens as it may, each from a law of the text before it, and reports the laws truthfully."""

    capabilities = ProposerCapabilities(draft_probs=True)

    def __init__(self, logits_of: Callable[[np.ndarray], Tensor], *, method: str = "probabilistic") -> None:
        """Take the law.

        Args:
            logits_of: gives float32 [V], the logits of the token that follows int64 ``token_ids``; the law is their
                softmax at the request's temperature.
            method: as for `DraftSampler`.
        """
        self._logits_of = logits_of
        self._sampler = DraftSampler(method)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        temperature, seeds = sampling_tensors(batch)
        texts = [tokens.tolist() for tokens in batch.token_ids]
        limits = batch.max_draft_tokens.tolist()
        tokens: list[list[int]] = [[] for _ in texts]
        probs: list[list[Tensor]] = [[] for _ in texts]
        for place in range(max(limits, default=0)):
            some = [r for r, limit in enumerate(limits) if place < limit]
            logits = torch.stack([self._logits_of(np.array(texts[r], dtype=np.int64)) for r in some])
            positions = torch.tensor([len(texts[r]) for r in some])
            chosen, laws = self._draw(logits, temperature[some], seeds[some], positions, place)
            for i, r in enumerate(some):
                texts[r].append(int(chosen[i]))
                tokens[r].append(int(chosen[i]))
                if laws is not None:
                    probs[r].append(laws[i])
        rows = [law for one in probs for law in one]
        return Draft(
            token_ids=torch.tensor([token for one in tokens for token in one], dtype=torch.int64),
            num_draft_tokens=torch.tensor(limits, dtype=torch.int32),
            draft_probs=torch.stack(rows) if rows else None,
        )

    def _draw(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, place: int
    ) -> tuple[Tensor, Tensor | None]:
        return self._sampler.choose(logits, temperature, seeds, positions, draft_position=place)


class MisreportingProposer(LawProposer):
    """Draws at a temperature of its own and reports the law as if it had not: plausible text, wrong law.

    No check at the boundary can see it; a test of the law of the output must.
    """

    def __init__(self, logits_of: Callable[[np.ndarray], Tensor], *, warmth: float = 0.5) -> None:
        """Draw at ``warmth`` times the request's temperature."""
        super().__init__(logits_of)
        self._warmth = warmth

    def _draw(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, place: int
    ) -> tuple[Tensor, Tensor | None]:
        _, laws = super()._draw(logits, temperature, seeds, positions, place)
        tokens, _ = super()._draw(logits, temperature * self._warmth, seeds, positions, place)
        return tokens, laws
