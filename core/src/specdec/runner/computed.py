"""What a step computed, as proposers with hidden states or K/V of their own see it (`specdec.types.ComputedStep`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.types import ComputedStep

if TYPE_CHECKING:
    from specdec.engine.plan import ScheduledRequest
    from specdec.runner.batch import StepBatch
    from specdec.types import TargetOutput, Verdict


def computed_step(step: StepBatch, target: TargetOutput, verdict: Verdict) -> ComputedStep:
    """Describe a step after its commit; ``verdict`` tells the accepted paths of trees."""
    shares = step.scheduled
    paths = _accepted_paths(step, verdict)
    starts = np.cumsum([0, *(share.num_tokens for share in shares)])
    rows = [start + _kept(share, paths.get(i)) for i, (start, share) in enumerate(zip(starts, shares, strict=False))]
    return ComputedStep(
        batch=step.packed,
        target=target,
        request_ids=tuple([share.request.request_id for share in shares]),
        token_ids=tuple([share.request.token_ids for share in shares]),
        num_computed=np.array([share.request.num_computed_tokens for share in shares], dtype=np.int32),
        first_position=np.array([share.num_computed_tokens for share in shares], dtype=np.int32),
        num_preemptions=np.array([share.request.num_preemptions for share in shares], dtype=np.int32),
        kept=np.concatenate(rows),
        kept_start=np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32),
        samples=np.array([share.samples for share in shares], dtype=bool),
        finished=np.array([share.request.is_finished for share in shares], dtype=bool),
    )


def _accepted_paths(step: StepBatch, verdict: Verdict) -> dict[int, list[int]]:
    """The accepted nodes of each request of the step, by its index, when the step had a tree."""
    if verdict.accepted_nodes is None:
        return {}
    return dict(zip(step.sampling_rows.tolist(), verdict.accepted_nodes.tolist(), strict=True))


def _kept(share: ScheduledRequest, path: list[int] | None) -> np.ndarray:
    """int64: which of the share's own tokens are part of the text; a stop may have cut the accepted path."""
    count = share.request.num_computed_tokens - share.num_computed_tokens
    known = share.num_tokens - len(share.draft)
    if path is None or count <= known:
        return np.arange(count)
    return np.concatenate([np.arange(known), known + np.array(path[: count - known], dtype=np.int64)])
