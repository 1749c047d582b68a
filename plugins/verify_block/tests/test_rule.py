"""The rule of block verification, enumerated: lossless to 1e-12, and never shorter than token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from specdec.testing.laws import TwoLaws
from specdec.verify.laws import accept_probability, normalised, residual
from specdec_verify_block.rule import pass_probability, path_weights

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]


def steps(laws: TwoLaws, draft: Sequence[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The chance of a draft, and the target's and the draft's law at each of its positions and behind it."""
    context = [0, 0, *draft]
    target = [laws.target[context[i], context[i + 1]] for i in range(len(draft) + 1)]
    drafted = [laws.draft[context[i], context[i + 1]] for i in range(len(draft) + 1)]
    chance = torch.tensor(1.0, dtype=torch.float64)
    for token, law in zip(draft, drafted, strict=False):
        chance = chance * law[token]
    return chance, target, drafted


def lengths(
    draft: Sequence[int], target: list[Tensor], drafted: list[Tensor], passing: Pass = pass_probability
) -> tuple[list[Tensor], Tensor]:
    """The probability of each kept length 0 … k, and the weights w_0 … w_k."""
    k = len(draft)
    ratios = torch.stack([target[i][token] / drafted[i][token] for i, token in enumerate(draft)])
    weights = path_weights(ratios[None])[0]
    surplus = torch.stack([(weights[i] * target[i + 1] - drafted[i + 1]).clamp(min=0).sum() for i in range(k)])
    passes = passing(weights, surplus, torch.arange(1, k + 1) == k)
    chances, left = [], torch.tensor(1.0, dtype=torch.float64)
    for i in reversed(range(k)):
        chances.insert(0, left * passes[i])
        left = left * (1 - passes[i])
    return [left, *chances], torch.cat([torch.ones(1, dtype=torch.float64), weights])


def block_law(laws: TwoLaws, k: int, passing: Pass = pass_probability, *, weighted: bool = True) -> Tensor:
    """float64 [V] * (k + 1): what a step emits, continued by the target where short.

    ``weighted``: whether the last token's residual is that of w_i times the target's law.
    """
    vocab_size = laws.vocab_size
    out = torch.zeros([vocab_size] * (k + 1), dtype=torch.float64)
    for draft in itertools.product(range(vocab_size), repeat=k):
        chance, target, drafted = steps(laws, draft)
        if float(chance) == 0:
            continue
        chances, weights = lengths(draft, target, drafted, passing)
        for kept, reach in enumerate(chances):
            if float(reach) == 0:
                continue
            scale = weights[kept] if weighted else 1.0
            law = target[k] if kept == k else normalised(residual(scale * target[kept], drafted[kept]))
            for token in range(vocab_size):
                weight = float(chance * reach * law[token])
                for tail in itertools.product(range(vocab_size), repeat=k - kept):
                    context = [0, 0, *draft[:kept], token, *tail]
                    total = weight
                    for i in range(kept + 1, k + 1):
                        total *= float(laws.target[context[i], context[i + 1], context[i + 2]])
                    out[(*draft[:kept], token, *tail)] += total
    return out


def random_laws(seed: int, zeros: bool) -> TwoLaws:
    laws = TwoLaws.random(3, seed=seed, agreement=0.3)
    if not zeros:
        return laws
    generator = torch.Generator().manual_seed(seed)
    target, draft = laws.target.clone(), laws.draft.clone()
    for law in (target, draft):
        law[torch.rand(law.shape, generator=generator) < 0.3] = 0
        law[law.sum(-1) == 0] = torch.tensor([0.0, 0.0, 1.0], dtype=law.dtype)
    target, draft = normalised(target), normalised(draft)
    draft[1] = target[1]
    return TwoLaws(target=target, draft=draft)


@pytest.mark.parametrize("zeros", [False, True], ids=["full", "with zeros"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_targets_law(seed: int, k: int, zeros: bool) -> None:
    laws = random_laws(seed, zeros)
    assert torch.allclose(block_law(laws, k), laws.law_of_texts(k + 1), rtol=0, atol=1e-12)


def test_a_wrong_rule_is_noticed() -> None:
    """Passing with w_i throughout, as if each length were the last; and a residual that forgets the weight."""

    def distance(law: Tensor) -> float:
        return float((law - laws.law_of_texts(3)).abs().sum() / 2)

    laws = TwoLaws.random(4, seed=2, agreement=0.0)
    assert distance(block_law(laws, 2)) < 1e-12
    assert distance(block_law(laws, 2, lambda weights, surplus, is_last: weights)) > 1e-3
    assert distance(block_law(laws, 2, weighted=False)) > 1e-3


def expected_lengths(laws: TwoLaws, k: int) -> tuple[float, float]:
    """Draft tokens kept on average, jointly and token by token."""
    jointly = one_by_one = 0.0
    for draft in itertools.product(range(laws.vocab_size), repeat=k):
        chance, target, drafted = steps(laws, draft)
        chances, _ = lengths(draft, target, drafted)
        jointly += float(chance * sum(kept * reach for kept, reach in enumerate(chances)))
        reach = chance
        for i, token in enumerate(draft):
            reach = reach * accept_probability(target[i][token], drafted[i][token])
            one_by_one += float(reach)
    return jointly, one_by_one


def test_never_shorter_than_token_by_token() -> None:
    gains = []
    for seed in range(60):
        jointly, one_by_one = expected_lengths(TwoLaws.random(3, seed=seed, agreement=0.2), 2)
        assert jointly >= one_by_one - 1e-12
        gains.append(jointly / one_by_one)
    assert max(gains) > 1.02


def test_equal_laws_keep_everything() -> None:
    laws = TwoLaws.random(3, seed=1, agreement=1.0)
    assert expected_lengths(laws, 3)[0] == pytest.approx(3.0, abs=1e-9)


def test_one_hot_drafts_gain_nothing() -> None:
    laws = TwoLaws.random(3, seed=2)
    one_hot = torch.nn.functional.one_hot(laws.draft.argmax(-1), 3).double()
    _, target, _ = steps(
        laws, draft := [int(one_hot[0, 0].argmax()), int(one_hot[0, int(one_hot[0, 0].argmax())].argmax())]
    )
    chances, _ = lengths(draft, target, [one_hot[0, 0], one_hot[0, draft[0]], one_hot[draft[0], draft[1]]])
    jointly = float(sum(kept * reach for kept, reach in enumerate(chances)))
    assert jointly == pytest.approx(float(target[0][draft[0]] * (1 + target[1][draft[1]])))
