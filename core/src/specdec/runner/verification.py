"""From raw logits to a verdict: processed rows, then the verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.sampling.batch import SamplingBatch
from specdec.types import Rows

if TYPE_CHECKING:
    import torch

    from specdec.runner.batch import StepBatch
    from specdec.sampling.pipeline import LogitsPipeline
    from specdec.types import TargetOutput, Verdict
    from specdec.verify.base import Verifier


class Verification:
    """Holds the sampling tensors of the current set of requests between steps."""

    def __init__(self, pipeline: LogitsPipeline, verifier: Verifier, device: torch.device) -> None:
        self.verifier = verifier
        self._pipeline = pipeline
        self._device = device
        self._batch: SamplingBatch | None = None
        self._batch_of: tuple[str, ...] = ()

    def run(self, step: StepBatch, target: TargetOutput) -> tuple[torch.Tensor, Verdict]:
        """Process the sampling rows and verify them; returns (processed rows [R, V], verdict)."""
        batch = self._sampling_batch(step)
        num_rows = step.layout.request_index.shape[0]
        logits = target.logits if target.logits.shape[0] == num_rows else target.logits[:num_rows]
        drafts = [share.draft for share in step.sampling]
        processed = self._pipeline.process(logits, step.layout, step.draft, batch, drafts)
        rows = Rows(
            logits=processed,
            row_start=step.layout.row_start,
            request_index=step.layout.request_index,
            positions=step.layout.positions,
            num_requests=step.layout.num_requests,
            max_draft_tokens=step.layout.max_depth,
        )
        return processed, self.verifier.verify(rows, step.draft, batch)

    @property
    def grammar_seconds(self) -> float:
        """Time spent on grammar masks so far."""
        return self._pipeline.grammar_seconds

    def forget(self, request_id: str) -> None:
        """A request ended; another one may come with the same id."""
        if request_id in self._batch_of:
            self._batch, self._batch_of = None, ()
        self._pipeline.forget(request_id)

    def _sampling_batch(self, step: StepBatch) -> SamplingBatch:
        ids = tuple([share.request.request_id for share in step.sampling])
        if self._batch is None or ids != self._batch_of:
            self._batch = SamplingBatch.build([share.request for share in step.sampling], self._device)
            self._batch_of = ids
        return self._batch
