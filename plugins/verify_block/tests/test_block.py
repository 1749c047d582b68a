"""`block` end to end over several steps, and its parts against plain computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafting.sampling import DraftSampler
from specdec.sampling.noise import Purpose
from specdec.sampling.sampler import backend_of, draw
from specdec.testing.laws import Simulation, TwoLaws, deviations, sampling_of, step_rows
from specdec.types import Draft
from specdec.verify.rejection import RejectionVerifier
from specdec_verify_block import block
from specdec_verify_block.block import BlockVerifier
from specdec_verify_block.surplus import surplus, surplus_anywhere


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


def test_the_targets_law() -> None:
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
def test_uniforms_that_return_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block.uniforms

    def by_position(seeds: Tensor, first: Tensor, num: int, purpose: int) -> Tensor:
        positions = first[:, None] + torch.arange(num)
        return real(seeds[:, None].expand_as(positions).flatten(), positions.flatten(), 1, purpose).view_as(positions)

    monkeypatch.setattr(block, "uniforms", by_position)
    assert found(1_000_000) != []


@pytest.mark.slow
def test_recovery_without_the_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = block.last_tokens

    def unweighted(
        rows: Any, sampling: Any, row: Tensor, rejected: Tensor, stats: Any, probs: Tensor, at: Tensor
    ) -> Tensor:
        return real(rows, sampling, row, rejected, stats, probs / probs.sum(dim=-1, keepdim=True), at)

    monkeypatch.setattr(block, "last_tokens", unweighted)
    assert found(200_000, laws=TwoLaws.random(4, seed=2, agreement=0.0)) != []


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 1025])
def test_the_compiled_surplus(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, vocab_size, generator=generator)).to(dtype)
    logits[:, ::3] = -torch.inf if vocab_size > 1 else 1.0
    logits[4] = torch.nan
    rows, nodes = torch.tensor([5, 0, 0, 4]), torch.tensor([1, 2, 0, 1])
    probs = torch.randn(3, vocab_size, generator=generator).softmax(dim=-1)
    heat, scale = torch.tensor([0.6, 1.0, 1.7, 1.0]), torch.tensor([1.0, 0.4, 0.7, 1.0], dtype=torch.float64)
    statistics = backend_of("cpu").statistics(logits, heat, rows=rows)
    arguments = (logits, rows, heat, statistics, scale, probs, nodes)
    torch.testing.assert_close(surplus(*arguments), surplus_anywhere(*arguments), rtol=0, atol=1e-6, equal_nan=True)


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
