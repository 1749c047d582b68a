"""The rules of rejection sampling, enumerated: every draft, every decision, every recovered token, to 1e-12."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from specdec.testing.laws import TwoLaws
from specdec.verify.laws import accept_probability, normalised, residual

Accept = Callable[[Tensor, Tensor], Tensor]
Residual = Callable[[Tensor, Tensor], Tensor]


def laws_with_zeros(seed: int) -> TwoLaws:
    """Random laws in which target and draft each exclude some tokens; now and then they are equal or one-hot."""
    laws = TwoLaws.random(3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    target, draft = laws.target.clone(), laws.draft.clone()
    target[torch.rand(target.shape, generator=generator) < 0.25] = 0
    draft[torch.rand(draft.shape, generator=generator) < 0.25] = 0
    for law in (target, draft):
        law[law.sum(-1) == 0] = torch.tensor([0.0, 1.0, 0.0], dtype=law.dtype)
    target, draft = normalised(target), normalised(draft)
    draft[2, 1] = target[2, 1]
    return TwoLaws(target=target, draft=draft)


def chain_law(laws: TwoLaws, k: int, accept: Accept = accept_probability, rest: Residual = residual) -> Tensor:
    """float64 [V] * (k + 1): what a step emits for chains of k drafted tokens, continued by the target where short."""
    out = torch.zeros([laws.vocab_size] * (k + 1), dtype=torch.float64)
    for draft in itertools.product(range(laws.vocab_size), repeat=k):
        context = [0, 0, *draft]
        rows = [(laws.target[tuple(context[i : i + 2])], laws.draft[tuple(context[i : i + 2])]) for i in range(k + 1)]
        reach = torch.tensor(1.0, dtype=torch.float64)
        for token, (_, q) in zip(draft, rows, strict=False):
            reach = reach * q[token]
        for place, token in enumerate(draft):
            p, q = rows[place]
            chance = accept(p[token], q[token])
            _add(out, laws, draft[:place], reach * (1 - chance) * normalised(rest(p, q)))
            reach = reach * chance
        _add(out, laws, draft, reach * rows[k][0])
    return out


def _add(out: Tensor, laws: TwoLaws, kept: Sequence[int], last: Tensor) -> None:
    """Add the texts that begin with ``kept`` and a token of weights ``last``."""
    for token, weight in enumerate(last.tolist()):
        for tail in itertools.product(range(laws.vocab_size), repeat=out.dim() - len(kept) - 1):
            text = [*kept, token, *tail]
            context = [0, 0, *text]
            chance = weight
            for i in range(len(kept) + 1, len(text)):
                chance = chance * float(laws.target[context[i], context[i + 1], text[i]])
            out[tuple(text)] += chance


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [1, 2])
def test_chains_have_the_targets_law(seed: int, k: int) -> None:
    laws = laws_with_zeros(seed)
    assert torch.allclose(chain_law(laws, k), laws.law_of_texts(k + 1), rtol=0, atol=1e-12)


def one_hot_law(laws: TwoLaws, k: int, rest: Residual = residual) -> Tensor:
    """The same when drafts drawn from the draft's law are verified as one-hot."""
    out = torch.zeros([laws.vocab_size] * (k + 1), dtype=torch.float64)
    eye = torch.eye(laws.vocab_size, dtype=torch.float64)
    for draft in itertools.product(range(laws.vocab_size), repeat=k):
        context = [0, 0, *draft]
        reach = torch.tensor(1.0, dtype=torch.float64)
        for i, token in enumerate(draft):
            reach = reach * laws.draft[context[i], context[i + 1], token]
        for place, token in enumerate(draft):
            p = laws.target[context[place], context[place + 1]]
            chance = accept_probability(p[token], torch.ones_like(p[token]))
            _add(out, laws, draft[:place], reach * (1 - chance) * normalised(rest(p, eye[token])))
            reach = reach * chance
        _add(out, laws, draft, reach * laws.target[context[k], context[k + 1]])
    return out


@pytest.mark.parametrize("seed", range(4))
def test_any_draft_may_be_verified_as_one_hot(seed: int) -> None:
    """Exact even for a draft that was drawn: the price is acceptance alone."""
    laws = laws_with_zeros(seed)
    assert torch.allclose(one_hot_law(laws, 2), laws.law_of_texts(3), rtol=0, atol=1e-12)


def test_acceptance_is_what_the_two_laws_have_in_common() -> None:
    laws = laws_with_zeros(1)
    p, q = laws.target[0, 0], laws.draft[0, 0]
    assert torch.allclose((q * accept_probability(p, q)).sum(), torch.minimum(p, q).sum())
    assert torch.equal(accept_probability(p, p) * (p > 0), (p > 0).double())


def test_equal_laws_leave_a_residual_to_draw_from() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)


# --- trees ------------------------------------------------------------------------------------


def tree_law(
    laws: TwoLaws,
    parents: Sequence[int],
    *,
    accept: Accept = accept_probability,
    rest: Residual = residual,
    reported: bool = True,
) -> Tensor:
    """float64 [V, V]: the first two tokens of recursive rejection with siblings drawn without replacement.

    ``reported``: whether each child's law is the one it was drawn from; otherwise the node's law, as if drawn alone.
    """
    out = torch.zeros(laws.vocab_size, laws.vocab_size, dtype=torch.float64)
    for tokens in itertools.product(range(laws.vocab_size), repeat=len(parents)):
        chance = torch.tensor(1.0, dtype=torch.float64)
        drawn, known = [], []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            law = laws.draft[_context(tokens, parents, parent)].clone()
            alone = law.clone()
            for other in range(node):
                if parents[other] == parent:
                    law[tokens[other]] = 0
            if float(law.sum()) == 0:
                chance = chance * 0
                break
            drawn.append(normalised(law))
            known.append(drawn[-1] if reported else alone)
            chance = chance * drawn[-1][token]
        if float(chance) > 0:
            _walk(out, laws, tokens, parents, known, chance, -1, accept, rest)
    return out


def _context(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    first, second = [0, 0, *path][-2:]
    return first, second


def _walk(
    out: Tensor,
    laws: TwoLaws,
    tokens: Sequence[int],
    parents: Sequence[int],
    drafted: Sequence[Tensor],
    chance: Tensor,
    node: int,
    accept: Accept,
    rest: Residual,
) -> None:
    law = laws.target[_context(tokens, parents, node)]
    for child in [i for i, parent in enumerate(parents) if parent == node]:
        token = tokens[child]
        kept = accept(law[token], drafted[child][token])
        _walk(out, laws, tokens, parents, drafted, chance * kept, child, accept, rest)
        chance = chance * (1 - kept)
        law = normalised(rest(law, drafted[child]))
    kept_tokens: list[int] = []
    while node >= 0:
        kept_tokens.insert(0, tokens[node])
        node = parents[node]
    for token, weight in enumerate((chance * law).tolist()):
        text = [*kept_tokens, token]
        if len(text) == 1:
            out[token] += weight * laws.target[0, token]
        else:
            out[text[0], text[1]] += weight


TREES = [[-1], [-1, -1], [-1, -1, -1], [-1, 0], [-1, -1, 0], [-1, -1, 1, 1], [-1, 0, -1, 0]]


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_trees_have_the_targets_law(parents: list[int], seed: int) -> None:
    laws = TwoLaws.random(3, seed=seed)
    assert torch.allclose(tree_law(laws, parents), laws.law_of_texts(2), rtol=0, atol=1e-12)


# --- the tests can fail -----------------------------------------------------------------------


def distance(law: Tensor, laws: TwoLaws) -> float:
    return float((law - laws.law_of_texts(law.dim())).abs().sum() / 2)


def test_wrong_rules_are_noticed() -> None:
    laws = TwoLaws.random(3, seed=1)
    assert distance(chain_law(laws, 2, rest=lambda p, q: p), laws) > 1e-3
    assert distance(chain_law(laws, 2, accept=lambda p, q: (1.01 * p / q).clamp(max=1.0)), laws) > 1e-4
    assert distance(one_hot_law(laws, 2, rest=lambda p, q: p), laws) > 1e-3
    assert distance(tree_law(laws, [-1, -1], reported=False), laws) > 1e-3
    assert distance(tree_law(laws, [-1, -1], rest=lambda p, q: p), laws) > 1e-3
