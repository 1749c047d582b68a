"""What a stage of the logits pipeline sees besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from attrs import frozen
from torch import Tensor

from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.history import drafted_before
from specdec.types import Draft


class HostDraft(Protocol):
    """One request's draft as lists."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Draft tokens or nodes."""

    @property
    def parents(self) -> Sequence[int] | None:
        """For trees, as in `specdec.types.Draft`; None for chains."""


@frozen(eq=False)
class _Slice:
    token_ids: Sequence[int]
    parents: Sequence[int] | None


class StepRows:
    """The rows of one step: their layout, the draft and the requests' parameters."""

    def __init__(
        self, layout: RowLayout, draft: Draft, batch: SamplingBatch, drafts: Sequence[HostDraft] | None = None
    ) -> None:
        """Gather what the stages of one step look at.

        Args:
            layout: the rows.
            draft: the draft tokens, on the device.
            batch: the requests.
            drafts: the same draft per request on the host, when it is there already.
        """
        self.layout = layout
        self.draft = draft
        self.batch = batch
        self._drafts = drafts
        self._row_start = np.zeros(layout.num_requests + 1, dtype=np.int64)
        np.cumsum(layout.rows_per_request, out=self._row_start[1:])

    @cached_property
    def drafted_before(self) -> Tensor:
        """int64 [R, D]: draft tokens before each row, nearest first, padded with -1; see `history.drafted_before`."""
        return drafted_before(self.layout, self.draft)

    @cached_property
    def only_ends(self) -> np.ndarray:
        """bool [R]: rows in which a grammar allows end tokens and nothing else; `min_tokens` cannot hold there."""
        return np.zeros(int(self._row_start[-1]), dtype=bool)

    def draft_of(self, request: int) -> tuple[Sequence[int], Sequence[int] | None]:
        """One request's draft tokens on the host, and the parents of its nodes when it is a tree."""
        if self._drafts is None:
            self._drafts = self._drafts_from_device()
        draft = self._drafts[request]
        return draft.token_ids, draft.parents

    def _drafts_from_device(self) -> Sequence[HostDraft]:
        tokens = self.draft.token_ids.tolist()
        parents = None if self.draft.parents is None else self.draft.parents.tolist()
        starts = self._row_start - np.arange(len(self._row_start))
        spans = [slice(*span) for span in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        return [_Slice(tokens[span], None if parents is None else parents[span]) for span in spans]

    def rows_of(self, request: int) -> slice:
        """The rows of one request."""
        return slice(int(self._row_start[request]), int(self._row_start[request + 1]))

    def rows_of_all(self, requests: tuple[int, ...]) -> np.ndarray:
        """int64: the rows of several requests, in order."""
        parts = [np.arange(self._row_start[r], self._row_start[r + 1]) for r in requests]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class LogitsStage(Protocol):
    """One option, or a few of a kind, as a change to the logits of the rows whose requests use it.

    Row i must be changed exactly as if the draft tokens before it had been emitted.
    """

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for; when none, it is skipped."""

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""

    def forget(self, request_id: str) -> None:
        """The request ended: drop what is kept for it."""
