"""Draft tokens are drawn from the law that is reported, with noise of their own or the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.drafting.trees import Trees, draft_trees
from specdec.errors import ConfigError
from specdec.sampling.noise import Purpose, exponentials, race
from specdec.sampling.params import SamplingParams
from specdec.types import DRAFT_SAMPLE_METHODS, ProposalInput

V = 12
ROWS = 6000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def rows(count: int = ROWS, width: int = V) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    index = torch.arange(count)
    temperature = torch.tensor([0.7, 0.0, 1.3])[index % 3]
    return logits[index % 3], temperature, index * 7919 + 3, 20 + index % 5


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match="'gumbel' is not one of greedy, probabilistic, coupled") as caught:
        DraftSampler("gumbel")
    assert caught.value.path == "speculative.draft_sample_method"


def test_greedy_takes_the_largest_logit() -> None:
    sampler = DraftSampler("greedy")
    logits, *rest = rows(9)
    tokens, probs = sampler.choose(logits, *rest, draft_position=0)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert probs is None
    assert not sampler.needs_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilistic_draws_from_the_law_it_reports(dtype: torch.dtype) -> None:
    sampler = DraftSampler("probabilistic")
    assert sampler.needs_probs
    logits, temperature, *rest = rows()
    logits = logits.to(dtype)
    tokens, probs = sampler.choose(logits, temperature, *rest, draft_position=2)
    assert probs is not None
    assert probs.dtype == torch.float32
    for kind, t in enumerate((0.7, None, 1.3)):
        mine = slice(kind, None, 3)
        if t is None:
            expected = torch.nn.functional.one_hot(logits[1].argmax(), V).float()
        else:
            expected = (logits[kind].double() / t).softmax(dim=-1).float()
        assert torch.allclose(probs[mine], expected.expand(ROWS // 3, V), atol=1e-6)
        counts = torch.bincount(tokens[mine], minlength=V) / (ROWS / 3)
        assert float((counts - expected).abs().sum() / 2) < 0.04


def test_coupled_makes_the_targets_own_draw() -> None:
    """With equal logits the draft is the target's sample; the draft is one-hot for the verifier."""
    sampler = DraftSampler("coupled")
    logits, temperature, seeds, positions = rows(300)
    tokens, probs = sampler.choose(logits, temperature, seeds, positions, draft_position=1)
    drawn, _ = race(logits, temperature.clamp(min=1e-3), seeds, positions, Purpose.SAMPLE)
    assert probs is None
    assert not sampler.needs_probs
    random = temperature > 0
    assert torch.equal(tokens[random], drawn[random])
    assert torch.equal(tokens[~random], logits.argmax(dim=-1)[~random])


def test_a_reduced_draft_vocabulary_is_reported_in_target_ids() -> None:
    ids = torch.tensor([1, 4, 5, 9])
    logits, temperature, seeds, positions = rows(600, width=4)

    def choose(method: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return DraftSampler(method).choose(
            logits, temperature, seeds, positions, lambda t: ids[t], draft_position=0, vocab_size=V
        )

    tokens, _ = choose("greedy")
    assert torch.equal(tokens, ids[logits.argmax(dim=-1)])
    tokens, probs = choose("probabilistic")
    assert set(tokens.tolist()) <= set(ids.tolist())
    assert probs is not None
    assert probs.shape == (600, V)
    assert torch.allclose(probs[0, ids], (logits[0] / temperature[0]).softmax(dim=-1))
    assert float(probs[:, [0, 2, 3, 6, 7, 8, 10, 11]].abs().max()) == 0
    tokens, _ = choose("coupled")
    wide = torch.full((600, V), -torch.inf).index_copy_(1, ids, logits)
    drawn, _ = race(wide, temperature.clamp(min=1e-3), seeds, positions, Purpose.SAMPLE)
    random = temperature > 0
    assert torch.equal(tokens[random], drawn[random]), "the noise must be keyed by target ids"


@pytest.mark.parametrize("method", DRAFT_SAMPLE_METHODS)
def test_padding_beyond_the_targets_vocabulary_is_never_drafted(method: str) -> None:
    logits, temperature, seeds, positions = rows(60)
    logits = logits.clone()
    logits[:, 10:] = 50.0
    tokens, probs = DraftSampler(method).choose(logits, temperature, seeds, positions, draft_position=0, vocab_size=10)
    assert int(tokens.max()) < 10
    assert probs is None or probs.shape == (60, 10)
    tokens, probs = DraftSampler(method).choose(logits, temperature, seeds, positions, draft_position=0, vocab_size=15)
    assert int(tokens.max()) < V
    assert probs is None or (probs.shape == (60, 15) and float(probs[:, V:].max()) == 0)


def test_very_low_temperature_reports_the_odds_it_draws_with() -> None:
    """In float32, 80000.01 / 1e-4 alone would lose them."""
    logits = torch.tensor([[3.0, 3.0001, 2.9999, -4.0]]).repeat(4000, 1)
    temperature = torch.full((4000,), 1e-4)
    tokens, probs = DraftSampler("probabilistic").choose(
        logits, temperature, torch.arange(4000), torch.full((4000,), 9), draft_position=0
    )
    assert probs is not None
    expected = ((logits[0].double() - 3) / temperature[0].double()).softmax(dim=-1)
    assert torch.allclose(probs[0].double(), expected, atol=1e-5)
    assert float((torch.bincount(tokens, minlength=4) / 4000 - expected).abs().sum() / 2) < 0.03


def test_noise_belongs_to_seed_position_and_step() -> None:
    """A verifier may have looked at the draft behind the kept tokens: the next step draws the same position anew."""
    logits = torch.zeros(64, 50)
    temperature, seeds = torch.ones(64), torch.arange(64)

    def choose(position: int, draft_position: int | torch.Tensor, seeds: torch.Tensor = seeds) -> list[int]:
        positions = torch.full((64,), position)
        tokens, _ = DraftSampler("probabilistic").choose(
            logits, temperature, seeds, positions, draft_position=draft_position
        )
        return tokens.tolist()

    assert choose(10, 2) == choose(10, 2)
    assert choose(10, 2) == choose(10, torch.full((64,), 2))
    different = [choose(10, 2), choose(10, 1), choose(11, 2), choose(11, 3), choose(10, 2, seeds + 64)]
    for i, first in enumerate(different):
        for second in different[i + 1 :]:
            assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_the_proposers_noise_is_not_the_targets() -> None:
    logits, temperature, seeds, positions = torch.zeros(64, 50), torch.ones(64), torch.arange(64), torch.full((64,), 8)
    tokens, _ = DraftSampler("probabilistic").choose(logits, temperature, seeds, positions, draft_position=0)
    for purpose in Purpose:
        drawn, _ = race(logits, temperature, seeds, positions, purpose)
        assert int((tokens == drawn).sum()) < 10


def test_a_row_without_numbers_gives_no_token() -> None:
    """The engine refuses such a draft; it must not look like token 0."""
    logits = torch.full((2, V), torch.nan)
    args = (torch.tensor([0.0, 1.0]), torch.arange(2), torch.arange(2))
    for method in DRAFT_SAMPLE_METHODS:
        tokens, _ = DraftSampler(method).choose(logits, *args, lambda t: t, draft_position=0, vocab_size=V)
        assert int(tokens.max()) < 0


def test_sampling_tensors() -> None:
    batch = ProposalInput(
        request_ids=("a", "b"),
        token_ids=(np.array([1]), np.array([2])),
        max_draft_tokens=np.array([1, 1], dtype=np.int32),
        sampling=(SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)),
        seeds=(2**64 - 1, 5),
    )
    temperature, seeds = sampling_tensors(batch)
    assert temperature.tolist() == pytest.approx([0.0, 0.8])
    assert seeds.tolist() == [-1, 5]


def test_children_are_drawn_without_replacement_from_the_laws_they_report() -> None:
    sampler = DraftSampler("probabilistic")
    logits = torch.tensor([1.0, 0.0, -0.5, 0.7, -torch.inf])
    count = 8000
    tokens, laws = sampler.choose_children(
        logits.expand(count, -1),
        torch.full((count,), 0.8),
        torch.arange(count),
        torch.full((count,), 6),
        2,
        draft_position=1,
    )
    assert bool((tokens[:, 0] != tokens[:, 1]).all())
    first = (logits / 0.8).softmax(dim=-1)
    assert torch.allclose(laws[:, 0], first.expand(count, -1), atol=1e-6)
    for token in range(4):
        mine = tokens[:, 0] == token
        rest = first.clone()
        rest[token] = 0
        rest /= rest.sum()
        assert torch.allclose(laws[mine, 1], rest.expand(int(mine.sum()), -1), atol=1e-6)
        assert abs(float(mine.double().mean()) - float(first[token])) < 0.02
        share = torch.bincount(tokens[mine, 1], minlength=5) / mine.sum()
        assert float((share - rest).abs().sum() / 2) < 0.05


def test_greedy_children_are_the_largest() -> None:
    logits = torch.tensor([[1.0, 4.0, -0.5, 3.0]])
    tokens, laws = DraftSampler("probabilistic").choose_children(
        logits, torch.zeros(1), torch.tensor([1]), torch.tensor([6]), 2, draft_position=0
    )
    assert tokens.tolist() == [[1, 3]]
    assert laws[0].argmax(dim=-1).tolist() == [1, 3]
    assert laws.sum().item() == 2


def test_requests_without_laws_beside_others_with_some_have_one_hot_ones() -> None:
    """Trees of another limit may all be greedy, and their nodes the likeliest."""

    def grow(members: np.ndarray, limit: int) -> Trees:
        tokens = torch.arange(limit).expand(len(members), -1)
        laws = torch.full((len(members), limit, 4), 0.25) if limit == 2 else None
        return Trees(tokens, torch.full_like(tokens, -1), laws)

    draft = draft_trees(np.array([1, 2, 0, 1]), grow)
    assert draft.token_ids.tolist() == [0, 0, 1, 0]
    assert draft.draft_probs is not None
    assert draft.draft_probs.tolist() == [[1, 0, 0, 0], [0.25] * 4, [0.25] * 4, [1, 0, 0, 0]]


def test_children_are_the_first_places_of_one_race() -> None:
    """Drawn one after another without those before, they are the top of the scores that all have at once."""
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(3))
    seeds, positions = torch.arange(5) + 11, torch.arange(5) * 7
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0])
    tokens, laws = DraftSampler("coupled").choose_children(logits, temperature, seeds, positions, 4, draft_position=0)
    noise = exponentials(seeds, positions, 70, Purpose.SAMPLE).log()
    scores = logits.double() / temperature.double().clamp(min=1e-9)[:, None]
    scores[1:] -= noise[1:]
    assert laws is None
    assert torch.equal(tokens, scores.topk(4).indices)


def test_coupled_at_temperature_0_is_greedy() -> None:
    """Through a reduced vocabulary as well, for chains and for trees."""
    ids = torch.tensor([3, 8, 20, 21, 60])
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(4))
    zeros, seeds, positions = torch.zeros(4), torch.arange(4), torch.arange(4)
    coupled, greedy = DraftSampler("coupled"), DraftSampler("greedy")
    for sampler in (coupled, greedy):
        tokens, _ = sampler.choose(logits, zeros, seeds, positions, ids.__getitem__, draft_position=0, vocab_size=70)
        assert torch.equal(tokens, ids[logits.argmax(dim=1)])
        children, _ = sampler.choose_children(
            logits, zeros, seeds, positions, 3, ids.__getitem__, draft_position=0, vocab_size=70
        )
        assert torch.equal(children, ids[logits.topk(3).indices])
