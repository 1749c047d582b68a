"""Chains of draft tokens, one token of every request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from attrs import frozen

from specdec.drafting.sampling import sampling_tensors
from specdec.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specdec.drafting.sampling import DraftSampler
    from specdec.types import ProposalInput


class NextLogits(Protocol):
    """Runs the newest draft token of some requests through the draft layers."""

    def __call__(self, token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
        """Logits of the tokens that follow.

        Args:
            token_ids: int64 [A] on the draft's device, in target ids.
            chosen: int64 [A]: which requests of the proposal they belong to, ascending.
            depth: index of these tokens within their drafts; the first draft token has 0.

        Returns:
            [A, draft vocabulary].
        """


@frozen(eq=False)
class Chains:
    """Drafts of B requests as rows of up to K tokens."""

    token_ids: Tensor
    """int64 [B, K] in target ids, on the draft's device; meaningless from ``counts`` on."""
    counts: np.ndarray
    """int64 [B]."""
    probs: Tensor | None = None
    """float32 [B, K, V]: the laws of the tokens."""
    confidence: Tensor | None = None
    """float32 [B, K]: the largest probability of each law at temperature 1."""

    def draft(self, device: torch.device | str = "cpu") -> Draft:
        """The drafts as a proposer returns them."""
        counts = torch.from_numpy(self.counts)
        depth = torch.arange(self.token_ids.shape[1])
        inside = (depth < counts[:, None]).to(self.token_ids.device)

        def packed(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows[inside].to(device)

        return Draft(
            token_ids=self.token_ids[inside].to(device),
            num_draft_tokens=counts.int(),
            draft_probs=packed(self.probs),
            confidence=packed(self.confidence),
        )


def no_draft(num_requests: int) -> Draft:
    """The draft that proposes nothing."""
    return Draft(
        token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(num_requests, dtype=torch.int32)
    )


class ChainDrafter:
    """Draws chains: chooses a token of every request, runs them, chooses the next ones."""

    def __init__(
        self,
        sampler: DraftSampler,
        *,
        vocab_size: int,
        confidence_threshold: float = 0.0,
        to_target_ids: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Hold what is the same for all steps.

        Args:
            sampler: picks the tokens.
            vocab_size: width of the target's logits.
            confidence_threshold: a draft ends before the first token whose law (at temperature 1) has no probability
                this large. The law is looked at before the token is drawn from it, so the rule keeps drafts with
                probabilities exact; 0 never ends a draft.
            to_target_ids: see `DraftSampler.choose`.
        """
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._threshold = confidence_threshold
        self._to_target_ids = to_target_ids

    def run(self, batch: ProposalInput, limits: np.ndarray, logits: Tensor, next_logits: NextLogits) -> Chains:
        """Draft up to ``limits[r]`` tokens for each request.

        Args:
            batch: the requests.
            limits: int64 [B], 0 for no draft.
            logits: [A, draft vocabulary]: of the newest token of each request with a limit above 0, in order.
            next_logits: runs draft tokens; the last token of a draft is not run.
        """
        writer = _Writer(len(limits), self._threshold > 0)
        temperature, seeds = sampling_tensors(batch, logits.device)
        ends = torch.tensor([len(tokens) for tokens in batch.token_ids], device=logits.device)
        active = np.flatnonzero(limits > 0)
        for depth in range(int(limits.max(initial=0))):
            confidence = None
            if self._threshold > 0:
                confidence = logits.float().softmax(dim=-1).amax(dim=-1)
                sure = (confidence >= self._threshold).cpu()
                active, logits, confidence = active[sure.numpy()], logits[sure], confidence[sure]
            if not len(active):
                break
            rows = torch.from_numpy(active).to(logits.device)
            tokens, probs = self._sampler.choose(
                logits,
                temperature[rows],
                seeds[rows],
                ends[rows] + depth,
                self._to_target_ids,
                draft_position=depth,
                vocab_size=self._vocab_size,
            )
            writer.write(rows, active, tokens, probs, confidence)
            going = limits[active] > depth + 1
            if not going.any():
                break
            if not going.all():
                active, tokens = active[going], tokens[torch.from_numpy(going).to(tokens.device)]
            logits = next_logits(tokens.clamp(min=0), active, depth)
        return writer.chains()


class _Writer:
    """Collects the tokens of chains."""

    def __init__(self, num_requests: int, with_confidence: bool) -> None:
        self._size = num_requests
        self._with_confidence = with_confidence
        self._counts = np.zeros(num_requests, dtype=np.int64)
        self._columns: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def write(
        self, rows: Tensor, active: np.ndarray, tokens: Tensor, probs: Tensor | None, confidence: Tensor | None
    ) -> None:
        self._counts[active] = len(self._columns) + 1
        self._columns.append((rows, tokens, probs, confidence))

    def chains(self) -> Chains:
        depth = len(self._columns)
        if not depth:
            none = torch.empty(self._size, 0)
            return Chains(none.long(), self._counts, None, none if self._with_confidence else None)
        first_tokens, first_probs = self._columns[0][1:3]
        token_ids = first_tokens.new_full((self._size, depth), -1)
        probs = None if first_probs is None else first_probs.new_zeros(self._size, depth, first_probs.shape[1])
        confidence = token_ids.new_zeros(token_ids.shape, dtype=torch.float32) if self._with_confidence else None
        for i, (rows, tokens, laws, sure) in enumerate(self._columns):
            token_ids[rows, i] = tokens
            if probs is not None and laws is not None:
                probs[rows, i] = laws
            if confidence is not None and sure is not None:
                confidence[rows, i] = sure
        return Chains(token_ids, self._without_failures(token_ids), probs, confidence)

    def _without_failures(self, token_ids: Tensor) -> np.ndarray:
        """A row without any token (NaN) gives a negative id: the draft ends before it."""
        failed = (token_ids < 0).cpu().numpy()
        first = np.where(failed.any(axis=1), failed.argmax(axis=1), failed.shape[1])
        return np.minimum(self._counts, first)
