"""Drafts under a grammar, enumerated: what a step emits has the law of constrained decoding without drafts, to 1e-12.

Every draft that the draft's law can give goes through the engine's own shaping and masks, then through the rules of
rejection sampling; short runs are continued by the constrained target.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.engine.request import RequestDraft
from specdec.grammar.state import RequestGrammar, bitmask_width
from specdec.runner.shaping import DraftShaping
from specdec.testing.grammars import RuleGrammar
from specdec.testing.laws import TwoLaws
from specdec.verify.laws import accept_probability, normalised, residual

VOCAB, END = 4, 3


def allowed(path: tuple[int, ...]) -> tuple[int, ...]:
    """The grammar: what may follow depends on the last token; after 2, only 1; the text may end after 0 or 1."""
    if not path:
        return (0, 1, 2)
    return {0: (1, 2, END), 1: (0, 2, END), 2: (1,)}[path[-1]]


def grammar() -> RequestGrammar:
    return RequestGrammar(RuleGrammar(allowed, VOCAB, (END,)), vocab_size=VOCAB, end_token_ids=(END,))


def masks_of(tokens: Sequence[int], parents: Sequence[int] | None) -> Tensor:
    """bool [N + 1, VOCAB]: the masks that the logits of a draft's rows get."""
    words = np.zeros((len(tokens) + 1, bitmask_width(VOCAB)), dtype=np.int32)
    grammar().fill(tokens, parents, words)
    return torch.from_numpy(((words[:, :1] >> np.arange(VOCAB)) & 1).astype(bool))


def shaped(shaping: DraftShaping, draft: RequestDraft, limit: int) -> RequestDraft:
    request = SimpleNamespace(request_id="r", grammar=grammar(), params=SimpleNamespace(greedy=False))
    return shaping.shape(request, draft, limit)  # type: ignore[arg-type]


def given(law: Tensor, path: Sequence[int]) -> Tensor:
    """A law over pairs, [V, V, V], where ``path`` stands."""
    first, last = [0, 0, *path][-2:]
    return law[first, last]


class Law:
    """What is emitted, as the law of the first ``length`` tokens; after the end comes the end, for ever."""

    def __init__(self, laws: TwoLaws, length: int) -> None:
        self.laws, self.length = laws, length
        self.table = torch.zeros([VOCAB] * length, dtype=torch.float64)

    def emit(self, run: Sequence[int], chance: float) -> None:
        """A run was emitted: cut it where the grammar ends, and go on with plain constrained decoding."""
        if chance <= 0:
            return
        text = list(run[: grammar().advance(run)])
        self._go_on(text[: self.length], chance)

    def _go_on(self, text: list[int], chance: float) -> None:
        if END in text:
            text = text + [END] * (self.length - len(text))
        if len(text) == self.length:
            self.table[tuple(text)] += chance
            return
        law = constrained(self.laws, text)
        for token in law.nonzero()[:, 0].tolist():
            self._go_on([*text, token], chance * float(law[token]))


def constrained(laws: TwoLaws, path: Sequence[int]) -> Tensor:
    """The target's law where ``path`` stands, under the grammar."""
    law = given(laws.target, path).clone()
    law[[token for token in range(VOCAB) if token not in allowed(tuple(path))]] = 0
    return normalised(law)


def plain_law(laws: TwoLaws, length: int) -> Tensor:
    law = Law(laws, length)
    law.emit([], 1.0)
    return law.table


def with_zeros(seed: int) -> TwoLaws:
    """Random laws whose draft excludes some tokens and is now and then the target's own."""
    laws = TwoLaws.random(VOCAB, seed=seed, agreement=0.5)
    draft = laws.draft.clone()
    draft[torch.rand(draft.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = 0
    draft[draft.sum(-1) == 0] = 1.0
    draft[1] = laws.target[1]
    return TwoLaws(target=laws.target, draft=normalised(draft))


# --- chains ---------------------------------------------------------------------------------------


def chain_law(laws: TwoLaws, k: int, shaping: DraftShaping, length: int, limit: int) -> Tensor:
    """The law after one step with chains of ``k`` drawn tokens, shaped to at most ``limit``."""
    law = Law(laws, length)
    for tokens in itertools.product(range(VOCAB), repeat=k):
        probs = torch.stack([given(laws.draft, tokens[:i]) for i in range(k)])
        chance = float(probs[range(k), list(tokens)].prod())
        if chance > 0:
            _verify_chain(law, shaped(shaping, RequestDraft(list(tokens), None, probs), limit), chance)
    return law.table


def _verify_chain(law: Law, draft: RequestDraft, reach: float) -> None:
    tokens = draft.token_ids
    masks = masks_of(tokens, None)
    for place in range(len(tokens) + 1):
        target = normalised(given(law.laws.target, tokens[:place]) * masks[place])
        if place == len(tokens):
            rest, stays = target * reach, 0.0
        else:
            drafted = _law_of(draft, place)
            stays = float(accept_probability(target[tokens[place]], drafted[tokens[place]]))
            rest = normalised(residual(target, drafted)) * (reach * (1 - stays))
        for token, weight in enumerate(rest.tolist()):
            law.emit([*tokens[:place], token], weight)
        reach *= stays


def _law_of(draft: RequestDraft, node: int) -> Tensor:
    if draft.probs is not None:
        return draft.probs[node]
    return torch.eye(VOCAB, dtype=torch.float64)[draft.token_ids[node]]


LENGTH = 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keeps_laws", [True, False], ids=["laws", "one-hot"])
@pytest.mark.parametrize(("k", "limit"), [(1, 1), (2, 2), (3, 3), (2, 4)])
def test_chains(k: int, limit: int, keeps_laws: bool, seed: int) -> None:
    """Drawn chains, verified by their laws or as one-hot, with room for what the grammar forces or without."""
    laws = with_zeros(seed)
    found = chain_law(laws, k, DraftShaping(keeps_laws=keeps_laws), LENGTH, limit)
    assert torch.allclose(found, plain_law(laws, LENGTH), rtol=0, atol=1e-12)


# --- trees ----------------------------------------------------------------------------------------


def tree_law(laws: TwoLaws, parents: Sequence[int], shaping: DraftShaping, length: int) -> Tensor:
    """The law after one step with trees of this shape, whose siblings are drawn without replacement."""
    law = Law(laws, length)
    for tokens in itertools.product(range(VOCAB), repeat=len(parents)):
        chance, probs = 1.0, []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            drawn = given(laws.draft, _path(tokens, parents, parent)).clone()
            drawn[[tokens[other] for other in range(node) if parents[other] == parent]] = 0
            if float(drawn.sum()) == 0:
                chance = 0.0
                break
            probs.append(normalised(drawn))
            chance *= float(probs[-1][token])
        if chance > 0:
            draft = RequestDraft(list(tokens), list(parents), torch.stack(probs))
            _verify_tree(law, shaped(shaping, draft, len(tokens)), chance)
    return law.table


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def _verify_tree(law: Law, draft: RequestDraft, chance: float) -> None:
    parents = draft.parents if draft.parents is not None else []
    masks = masks_of(draft.token_ids, parents)
    _walk(law, draft, parents, masks, -1, chance)


def _walk(law: Law, draft: RequestDraft, parents: Sequence[int], masks: Tensor, node: int, chance: float) -> None:
    path = _path(draft.token_ids, parents, node)
    target = given(law.laws.target, path) * masks[node + 1]
    for child in [child for child, parent in enumerate(parents) if parent == node]:
        target = normalised(target)
        token, drafted = draft.token_ids[child], _law_of(draft, child)
        stays = float(accept_probability(target[token], drafted[token]))
        if chance * stays > 0:
            _walk(law, draft, parents, masks, child, chance * stays)
        chance *= 1 - stays
        target = residual(target, drafted)
    for token, weight in enumerate((chance * normalised(target)).tolist()):
        law.emit([*path, token], weight)


TREES = [[-1, -1], [-1, 0], [-1, -1, 0], [-1, -1, -1], [-1, -1, 0, 0], [-1, -1, 1, 1], [-1, 0, 0, 1]]


@pytest.mark.parametrize("keeps_laws", [True, False], ids=["recursive", "one-hot"])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_trees(parents: list[int], keeps_laws: bool) -> None:
    laws = TwoLaws.random(VOCAB, seed=2, agreement=0.5)
    found = tree_law(laws, parents, DraftShaping(keeps_laws=keeps_laws), 3)
    assert torch.allclose(found, plain_law(laws, 3), rtol=0, atol=1e-12)


# --- what a drawn draft keeps ---------------------------------------------------------------------


def accepted(laws: TwoLaws, shaping: DraftShaping) -> float:
    """How many of two drawn tokens are kept on average."""
    total = 0.0
    for tokens in itertools.product(range(VOCAB), repeat=2):
        probs = torch.stack([given(laws.draft, tokens[:i]) for i in range(2)])
        chance = float(probs[range(2), list(tokens)].prod())
        draft = shaped(shaping, RequestDraft(list(tokens), None, probs), 2)
        masks = masks_of(draft.token_ids, None)
        for place, token in enumerate(draft.token_ids):
            target = normalised(given(laws.target, tokens[:place]) * masks[place])
            chance *= float(accept_probability(target[token], _law_of(draft, place)[token]))
            total += chance
    return total


def test_laws_keep_more() -> None:
    laws = TwoLaws.random(VOCAB, seed=1, agreement=0.8)
    assert accepted(laws, DraftShaping(keeps_laws=True)) > 1.05 * accepted(laws, DraftShaping(keeps_laws=False))


# --- the tests can fail ---------------------------------------------------------------------------


class CutsDrawn(DraftShaping):
    """Leaves out a drawn token that the grammar refuses, and keeps the laws of those before it."""

    def _cut(self, grammar: RequestGrammar, draft: RequestDraft, drawn: bool) -> RequestDraft:
        fits = grammar.fitting(draft.token_ids, draft.parents)
        kept = [node for node, ok in enumerate(fits) if ok]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        parents = None if draft.parents is None else [place[draft.parents[node]] for node in kept]
        assert draft.probs is not None
        return RequestDraft([draft.token_ids[node] for node in kept], parents, draft.probs[kept])


class KeepsFitting(DraftShaping):
    """Keeps the laws of drafts that happen to fit and takes the others as one-hot."""

    def _cut(self, grammar: RequestGrammar, draft: RequestDraft, drawn: bool) -> RequestDraft:
        return super()._cut(grammar, draft, all(grammar.fitting(draft.token_ids, draft.parents)))


def distance(law: Tensor, laws: TwoLaws) -> float:
    return float((law - plain_law(laws, law.dim())).abs().sum() / 2)


@pytest.mark.parametrize("fault", [CutsDrawn, KeepsFitting])
def test_wrong_shaping_is_noticed(fault: type[DraftShaping]) -> None:
    laws = TwoLaws.random(VOCAB, seed=1, agreement=0.5)
    assert distance(chain_law(laws, 2, fault(keeps_laws=True), 3, 2), laws) > 1e-2
    assert distance(tree_law(laws, [-1, -1, 0], fault(keeps_laws=True), 3), laws) > 1e-2


def test_masks_by_depth_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the nodes of one depth share the mask of the first (known from other engines)."""
    original = masks_of

    def by_depth(tokens: Sequence[int], parents: Sequence[int] | None) -> Tensor:
        masks = original(tokens, parents)
        first: dict[int, int] = {}
        for node in range(-1, len(tokens)):
            depth = len(_path(tokens, parents or [], node))
            masks[node + 1] = masks[first.setdefault(depth, node + 1)]
        return masks

    monkeypatch.setitem(globals(), "masks_of", by_depth)
    laws = TwoLaws.random(VOCAB, seed=1)
    with pytest.raises(Exception, match="is not one that the grammar allows"):
        tree_law(laws, [-1, -1, 0], DraftShaping(keeps_laws=True), 3)
