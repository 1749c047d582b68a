"""`block` end to end over several steps, and its parts against plain computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafting.sampling import DraftSampler
from specdec.sampling.cpu.calls import StepCall
from specdec.sampling.noise import Purpose
from specdec.sampling.sampler import draw
from specdec.testing.laws import Simulation, TwoLaws, deviations, sampling_of, step_rows
from specdec.testing.steps import RandomStep, runs_of
from specdec.types import Draft
from specdec.verify.rejection import RejectionVerifier
from specdec_verify_block import block
from specdec_verify_block.block import BlockVerifier
from specdec_verify_block.cpu import DECIDED


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


LAWS = TwoLaws.random(3, seed=4, agreement=0.2)
K = 3
LENGTH = 5
"""Tokens: two to five steps."""


def found(count: int, **changes: Any) -> list[str]:
    settings: dict[str, Any] = {"laws": LAWS, "verifier": BlockVerifier(), "num_draft_tokens": K} | changes
    texts = Simulation(**settings).texts(count, LENGTH)
    return deviations(texts, settings["laws"].law_of_texts(LENGTH))


@pytest.fixture
def by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rule run in plain torch, as on devices; its parts can be spoilt."""
    monkeypatch.setattr(block, "_verify_blocks", block.verify_by_parts)


def test_the_targets_law() -> None:
    assert found(8_000) == []


@pytest.mark.usefixtures("by_parts")
def test_the_targets_law_by_parts() -> None:
    assert found(8_000) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["probabilistic", "coupled"])
def test_the_targets_law_with_many_texts(method: str) -> None:
    assert found(1_000_000, sampler=DraftSampler(method)) == []


class NoiseByPosition(DraftSampler):
    """Draws with noise keyed by position alone, so that the next step meets what this one has looked at."""

    def __init__(self) -> None:
        super().__init__("probabilistic")

    def choose(self, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        _, law = super().choose(logits, *rest, **named)
        return draw(logits, *rest[:3], Purpose.DRAFT), law


@pytest.mark.slow
def test_draft_noise_that_returns_is_found() -> None:
    assert found(1_000_000, sampler=NoiseByPosition()) != []


@pytest.mark.slow
@pytest.mark.usefixtures("by_parts")
def test_uniforms_that_return_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block.uniforms

    def by_position(seeds: Tensor, first: Tensor, num: int, purpose: int) -> Tensor:
        positions = first[:, None] + torch.arange(num)
        return real(seeds[:, None].expand_as(positions).flatten(), positions.flatten(), 1, purpose).view_as(positions)

    monkeypatch.setattr(block, "uniforms", by_position)
    assert found(1_000_000) != []


@pytest.mark.slow
@pytest.mark.usefixtures("by_parts")
def test_recovery_without_the_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block.last_tokens

    def unweighted(
        rows: Any, sampling: Any, row: Tensor, rejected: Tensor, stats: Any, probs: Tensor, at: Tensor
    ) -> Tensor:
        return real(rows, sampling, row, rejected, stats, probs / probs.sum(dim=-1, keepdim=True), at)

    monkeypatch.setattr(block, "last_tokens", unweighted)
    assert found(200_000, laws=TwoLaws.random(4, seed=2, agreement=0.0)) != []


@pytest.mark.usefixtures("by_parts")
def test_recovery_from_the_target_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block.last_tokens

    def recovered(
        rows: Any, sampling: Any, row: Tensor, rejected: Tensor, stats: Any, probs: Tensor, at: Tensor
    ) -> Tensor:
        return real(rows, sampling, row, rejected, stats, torch.zeros_like(probs), at)

    monkeypatch.setattr(block, "last_tokens", recovered)
    assert found(8_000) != []


def kept(verifier: Any, laws: TwoLaws, count: int = 4_000) -> float:
    """Mean draft tokens kept in a first step."""
    lengths = []

    class Watching(type(verifier)):  # type: ignore[misc]
        def verify(self, *args: Any) -> Any:
            verdict = super().verify(*args)
            lengths.append(float(verdict.num_tokens.float().mean()) - 1)
            return verdict

    Simulation(laws=laws, verifier=Watching(), num_draft_tokens=4).texts(count, 1)
    return lengths[0]


def test_keeps_more_than_token_by_token() -> None:
    laws = TwoLaws.random(8, seed=3, agreement=0.3)
    assert kept(BlockVerifier(), laws) > 1.02 * kept(RejectionVerifier(), laws)


def test_a_draft_like_the_target_is_always_kept() -> None:
    laws = TwoLaws(target=LAWS.target, draft=LAWS.target)
    assert kept(BlockVerifier(), laws) == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_rule(dtype: torch.dtype, num_threads: int) -> None:
    """For any mixture of requests, in one range or several, it gives the runs of the rule in plain torch."""
    torch.set_num_threads(num_threads)
    kept = 0
    for seed in range(12):
        for num_requests, vocab_size in ((2, 2500), (20, 5)):
            step = RandomStep.of(seed, vocab_size, laws=True, num_requests=num_requests, dtype=dtype)
            verdict = BlockVerifier().verify(step.rows, step.draft, step.sampling)
            parts = block.verify_by_parts(step.rows, step.draft, step.sampling)
            assert runs_of(verdict) == runs_of(parts)
            kept += int(verdict.num_tokens.sum()) - num_requests
    torch.set_num_threads(1)
    assert kept > 100


def test_few_sums_over_the_vocabulary_are_needed() -> None:
    """Lengths whose uniform is above w_i, or whose w_i is 1, are decided without: most are."""
    step = RandomStep.of(3, 50, laws=True, num_requests=200)
    call = StepCall(step.rows, step.draft, step.sampling)
    call.run(block.KERNELS.address("block_region"))
    lengths = int((step.draft.num_draft_tokens - 1).clamp(min=0).sum())
    assert 0 < int((call.states >= DECIDED).sum()) < 0.3 * lengths


@pytest.mark.parametrize("spoilt", [torch.nan, -torch.inf])
@pytest.mark.parametrize("way", ["compiled", "parts"])
def test_nothing_behind_a_row_without_a_token_is_kept(spoilt: float, way: str) -> None:
    """Whatever lies behind it, a run ends there at the latest."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(50, 6, 4)
    logits[:, 2] = spoilt
    tokens = torch.randint(0, 4, (250,), generator=generator)
    draft = Draft(token_ids=tokens, num_draft_tokens=torch.full((50,), 5).int(), draft_probs=torch.full((250, 4), 0.25))
    rows = step_rows(logits.flatten(0, 1), draft, torch.full((50,), 5))
    verify = BlockVerifier().verify if way == "compiled" else block.verify_by_parts
    verdict = verify(rows, draft, sampling_of(torch.arange(50)))
    assert verdict.num_tokens.tolist() == [3] * 50
    assert verdict.token_ids[:, 2].tolist() == [-2 if spoilt != spoilt else -3] * 50


def test_a_row_without_numbers_ends_the_run_it_is_reached_by() -> None:
    """With probabilities too: the code stands in the first bad row's place, if everything before it is kept."""
    logits = torch.full((3, 4), -60.0)
    logits[0, 2] = logits[2, 1] = 60.0
    logits[1] = torch.nan
    probs = torch.full((2, 4), 0.25)
    draft = Draft(token_ids=torch.tensor([2, 3]), num_draft_tokens=torch.tensor([2]).int(), draft_probs=probs)
    rows = step_rows(logits, draft, torch.tensor([5]))
    verdict = BlockVerifier().verify(rows, draft, sampling_of(torch.tensor([1])))
    assert verdict.token_ids.tolist() == [[2, -2, -1]]
