"""The laws of a step's drafts stand in line with its draft tokens, whoever has one."""

from __future__ import annotations

import torch

from specdec.engine.plan import Plan, ScheduledRequest
from specdec.engine.request import NO_DRAFT, Request, RequestDraft
from specdec.runner.batch import BatchBuilder
from specdec.sampling.params import SamplingParams
from specdec.types import Draft

V = 6


def built(drafts: list[RequestDraft]) -> Draft:
    builder = BatchBuilder(max_num_seqs=8, max_model_len=64, block_size=4, device=torch.device("cpu"))
    scheduled = []
    for i, draft in enumerate(drafts):
        request = Request(
            f"r{i}",
            [1, 2, 3],
            SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            stop_checker=None,  # type: ignore[arg-type]
            max_tokens=9,
        )
        request.batch_row, request.block_ids = i, [2 * i, 2 * i + 1]
        scheduled.append(ScheduledRequest(request, 2, 1 + len(draft), draft, samples=True))
    return builder.build(Plan(tuple(scheduled))).draft


def test_drafts_without_a_law_become_one_hot_rows_beside_those_with() -> None:
    law = torch.tensor([[0.5, 0.25, 0.25, 0, 0, 0], [0, 0, 0, 0.5, 0.25, 0.25]])
    drafts = [RequestDraft([4, 0]), NO_DRAFT, RequestDraft([1, 3], None, law), RequestDraft([5])]
    probs = built(drafts).draft_probs
    assert probs is not None
    assert probs.dtype == torch.float32
    one_hot = torch.eye(V)
    assert torch.equal(probs, torch.cat([one_hot[[4, 0]], law, one_hot[[5]]]))


def test_without_any_law_there_is_none() -> None:
    assert built([RequestDraft([4, 0]), NO_DRAFT]).draft_probs is None
