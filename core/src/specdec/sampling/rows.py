"""What a stage of the logits pipeline sees besides the logits."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.history import drafted_before
from specdec.types import Draft


class StepRows:
    """The rows of one step: their layout, the draft and the requests' parameters."""

    def __init__(self, layout: RowLayout, draft: Draft, batch: SamplingBatch) -> None:
        self.layout = layout
        self.draft = draft
        self.batch = batch
        self._row_start = np.zeros(layout.num_requests + 1, dtype=np.int64)
        np.cumsum(layout.rows_per_request, out=self._row_start[1:])

    @cached_property
    def drafted_before(self) -> Tensor:
        """int64 [R, D]: draft tokens before each row, nearest first, padded with -1; see `history.drafted_before`."""
        return drafted_before(self.layout, self.draft)

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
