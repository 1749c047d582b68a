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
        active = _Active.of(batch, np.flatnonzero(limits > 0), logits.device)
        for depth in range(int(limits.max(initial=0))):
            confidence = None
            if self._threshold > 0:
                confidence = logits.float().softmax(dim=-1).amax(dim=-1)
                sure = (confidence >= self._threshold).cpu()
                active, logits, confidence = active.only(sure.numpy()), logits[sure], confidence[sure]
            if not len(active.chosen):
                break
            tokens, probs = self._sampler.choose(
                logits,
                active.temperature,
                active.seeds,
                active.ends + depth,
                self._to_target_ids,
                draft_position=depth,
                vocab_size=self._vocab_size,
            )
            writer.write(active, tokens, probs, confidence)
            going = limits[active.chosen] > depth + 1
            if not going.any():
                break
            if not going.all():
                active, tokens = active.only(going), tokens[torch.from_numpy(going).to(tokens.device)]
            logits = next_logits(tokens.clamp(min=0), active.chosen, depth)
        return writer.chains()


@frozen(eq=False)
class _Active:
    """The requests whose drafts still grow, A of them."""

    chosen: np.ndarray
    """int64 [A]: which requests of the proposal."""
    rows: Tensor
    """The same as a tensor on the draft's device."""
    temperature: Tensor
    seeds: Tensor
    ends: Tensor
    """int64 [A]: the position of each request's first draft token."""

    @staticmethod
    def of(batch: ProposalInput, chosen: np.ndarray, device: torch.device) -> _Active:
        rows = torch.from_numpy(chosen).to(device)
        temperature, seeds = sampling_tensors(batch, device)
        ends = torch.tensor([len(tokens) for tokens in batch.token_ids], dtype=torch.int64).to(device)
        if len(chosen) == len(ends):
            return _Active(chosen, rows, temperature, seeds, ends)
        return _Active(chosen, rows, temperature[rows], seeds[rows], ends[rows])

    def only(self, kept: np.ndarray) -> _Active:
        """Those with True in bool [A]."""
        if kept.all():
            return self
        mask = torch.from_numpy(kept).to(self.rows.device)
        return _Active(self.chosen[kept], self.rows[mask], self.temperature[mask], self.seeds[mask], self.ends[mask])


class _Writer:
    """Collects the tokens of chains."""

    def __init__(self, num_requests: int, with_confidence: bool) -> None:
        self._size = num_requests
        self._with_confidence = with_confidence
        self._counts = np.zeros(num_requests, dtype=np.int64)
        self._columns: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def write(self, active: _Active, tokens: Tensor, probs: Tensor | None, confidence: Tensor | None) -> None:
        self._counts[active.chosen] = len(self._columns) + 1
        self._columns.append((active.rows, tokens, probs, confidence))

    def chains(self) -> Chains:
        if not self._columns:
            none = torch.empty(self._size, 0)
            return Chains(none.long(), self._counts, None, none if self._with_confidence else None)
        rows, tokens, laws, confidence = zip(*self._columns, strict=True)
        token_ids = self._gathered(rows, tokens, -1)
        assert token_ids is not None
        return Chains(
            token_ids,
            self._without_failures(token_ids),
            self._gathered(rows, laws, 0.0),
            self._gathered(rows, confidence, 0.0),
        )

    def _gathered(self, rows: tuple[Tensor, ...], values: tuple[Tensor | None, ...], missing: float) -> Tensor | None:
        """[B, K, …] from K columns [A, …] for some rows each; None for columns of None."""
        columns = [value for value in values if value is not None]
        if not columns:
            return None
        if all(len(column) == self._size for column in columns):
            return torch.stack(columns, dim=1)
        out = columns[0].new_full((self._size, len(columns), *columns[0].shape[1:]), missing)
        for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
            out[row, i] = column
        return out

    def _without_failures(self, token_ids: Tensor) -> np.ndarray:
        """A row without any token (NaN) gives a negative id: the draft ends before it."""
        failed = (token_ids < 0).cpu().numpy()
        first = np.where(failed.any(axis=1), failed.argmax(axis=1), failed.shape[1])
        return np.minimum(self._counts, first)
