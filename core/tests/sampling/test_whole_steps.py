"""Whole steps in one call: on any number of threads, the compiled regions give the runs of the reference's rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdec.sampling.cpu import KERNELS
from specdec.sampling.cpu.backend import CpuSampling
from specdec.sampling.cpu.calls import StepCall
from specdec.sampling.cpu.steps import LEFT_OUT
from specdec.sampling.torch_backend import TorchSampling
from specdec.testing.steps import RandomStep, runs_of

COMPILED, REFERENCE = CpuSampling(), TorchSampling()


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("num_requests", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_are_the_references(dtype: torch.dtype, num_requests: int, threads: int) -> None:
    """With few requests rows are cut into ranges, with many they are not."""
    accepted = 0
    for seed, vocab_size in enumerate((1, 2, 9, 2500)):
        for trees in (False, True):
            step = RandomStep.of(seed, vocab_size, trees=trees, num_requests=num_requests, dtype=dtype)
            verdict = COMPILED.match(step.rows, step.draft, step.sampling)
            assert runs_of(verdict) == step.matched(REFERENCE)
            accepted += int(verdict.num_tokens.sum()) - num_requests
        for laws in (False, True):
            step = RandomStep.of(seed, vocab_size, laws=laws, num_requests=num_requests, dtype=dtype)
            verdict = COMPILED.reject(step.rows, step.draft, step.sampling)
            assert runs_of(verdict) == step.rejected(REFERENCE)
            accepted += int(verdict.num_tokens.sum()) - num_requests
    assert accepted > 0


def test_rows_behind_a_rejection_are_left_alone() -> None:
    """What makes it fast: where the first draft token is wrong, no row behind it is looked at."""
    torch.set_num_threads(1)
    step = RandomStep.of(5, 40, num_requests=20)
    step.draft.token_ids.fill_(39)
    step.rows.logits[:] = 0.0
    step.rows.logits[:, 39] = -torch.inf
    counts = step.draft.num_draft_tokens
    for region, behind in (("match_region", counts), ("reject_region", (counts - 1).clamp(min=0))):
        call = StepCall(step.rows, step.draft, step.sampling)
        assert call.run(KERNELS.address(region)).num_tokens.tolist() == [1] * 20
        assert int((call.states == LEFT_OUT).sum()) == int(behind.sum())
