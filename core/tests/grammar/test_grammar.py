"""A request's state in its grammar, the service that compiles, and the shaping of drafts."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.request import NO_DRAFT, RequestDraft
from specdec.errors import InvalidRequestError, RequestFailedError
from specdec.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, RequestGrammar, bitmask_of, service
from specdec.grammar.service import GrammarService
from specdec.runner.shaping import DraftShaping
from specdec.sampling.params import SamplingParams
from specdec.testing.grammars import ChoiceBackend, RuleGrammar
from specdec.testing.tokenizers import tiny_tokenizer

V, END = 40, 3


def state_of(*texts: Sequence[int], ignore_eos: bool = False, ends: Sequence[int] = (END,)) -> RequestGrammar:
    """A grammar of these token sequences."""

    def allowed(tokens: tuple[int, ...]) -> list[int]:
        fits = [text for text in texts if tuple(text[: len(tokens)]) == tokens]
        return [*{text[len(tokens)] for text in fits if len(text) > len(tokens)}, *(ends if tokens in texts else ())]

    texts = tuple(map(tuple, texts))
    return RequestGrammar(RuleGrammar(allowed, V, ends), vocab_size=V, end_token_ids=ends, ignore_eos=ignore_eos)


# --- a request's state ----------------------------------------------------------------------------


def test_committing() -> None:
    state = state_of([5, 6, 7], [5, 8])
    assert state.advance([5]) == 1
    assert state.advance([6, 7, END, 9, 9]) == 3
    assert state.is_terminated
    with pytest.raises(RequestFailedError, match="token 9 is not one that the grammar allows here"):
        state_of([5]).advance([9])
    assert state_of([5, 6]).advance([5, -2]) == 2, "a code of the verifier is no token"


def test_looking_ahead_changes_nothing() -> None:
    state = state_of([5, 6, 7], [5, 8])
    for _ in range(2):
        assert state.fitting([5, 8, END, 5], None) == [True, True, True, False]
        assert state.fitting([5, 5, 8, 6, 9, 7], [-1, 0, 0, 0, 3, 3]) == [True, False, True, True, False, True]
        assert state.forced([], 9) == [5]
        assert state.forced([5, 6], 9) == [7, END]
        assert state.forced([5, 6], 1) == [7]
        assert state.forced([9], 5) == []


@pytest.mark.parametrize(("vocab_size", "ids"), [(1, [0]), (32, [31]), (33, [32, 5]), (40, [])])
def test_bitmasks(vocab_size: int, ids: list[int]) -> None:
    bits = np.unpackbits(bitmask_of([*ids, vocab_size, -1], vocab_size).view(np.uint8), bitorder="little")
    assert bits.nonzero()[0].tolist() == sorted(ids)


def test_only_the_end_is_left() -> None:
    state = state_of([5], [5, 6])
    masks = np.empty((3, 2), dtype=np.int32)
    state.fill([5, 6], None, masks)
    assert state.only_ends(masks).tolist() == [False, False, True]
    state_of([5], [5, 6], ignore_eos=True).fill([5, 6], None, masks)
    assert [bitmask_of([5], V).tolist(), bitmask_of([6], V).tolist(), bitmask_of([END], V).tolist()] == masks.tolist()


def test_without_end_tokens_the_output_ends_where_nothing_follows() -> None:
    state = state_of([5, 6], [5, 6, 7], ends=())
    assert state.advance([5, 6]) == 2
    assert not state.is_terminated
    assert state.advance([7, 9]) == 1
    assert state.is_terminated


class CountingGrammar(RuleGrammar):
    """Counts the masks asked for."""

    filled = 0

    def matcher(self) -> Any:
        matcher, original = super().matcher(), None
        original = matcher.fill_bitmask

        def fill(bitmask: np.ndarray, row: int) -> None:
            type(self).filled += 1
            original(bitmask, row)

        matcher.fill_bitmask = fill  # type: ignore[method-assign]
        return matcher


def test_a_mask_found_while_drafting_is_not_made_again() -> None:
    state = RequestGrammar(CountingGrammar(lambda tokens: [1, 2], V), vocab_size=V, end_token_ids=[])
    CountingGrammar.filled = 0
    assert state.forced([1, 2], 4) == []
    assert CountingGrammar.filled == 1
    masks = np.empty((3, 2), dtype=np.int32)
    state.fill([1, 2], None, masks)
    assert CountingGrammar.filled == 3
    state.advance([1])
    state.fill([2], None, masks[:2])
    assert CountingGrammar.filled == 5, "after a commit the positions are others"


# --- shaping --------------------------------------------------------------------------------------


def shaped(
    state: RequestGrammar, draft: RequestDraft, limit: int = 8, *, keeps_laws: bool = False, greedy: bool = False
) -> tuple[RequestDraft, DraftShaping]:
    shaping = DraftShaping(keeps_laws=keeps_laws)
    request: Any = SimpleNamespace(grammar=state, request_id="r", params=SimpleNamespace(greedy=greedy))
    return shaping.shape(request, draft, limit), shaping


def test_chains_are_cut_and_extended() -> None:
    draft, shaping = shaped(state_of([5, 6, 7, 8], [5, 9]), RequestDraft([5, 6, 9, 9]))
    assert (draft.token_ids, draft.parents) == ([5, 6, 7, 8, END], None)
    assert (shaping.num_cut_tokens, draft.num_forced, draft.num_proposed) == (2, 3, 2)
    assert [draft.truncated(n).num_forced for n in (1, 2, 3, 5)] == [0, 0, 1, 3]
    assert shaped(state_of([5, 6, 7]), RequestDraft([5]), limit=2)[0].token_ids == [5, 6]
    assert shaped(state_of([5, 6, 7]), NO_DRAFT, limit=2)[0].token_ids == [5, 6]
    assert shaped(state_of([5], [6]), RequestDraft([9]))[0] is NO_DRAFT
    assert shaped(state_of([5, 6]), NO_DRAFT, limit=0)[0] is NO_DRAFT


def test_trees_lose_refused_branches() -> None:
    tree = RequestDraft([9, 5, 5, 6, 8, 7], [-1, -1, 0, 1, 1, 3])
    draft, shaping = shaped(state_of([5, 6, 7], [5, 9]), tree)
    assert (draft.token_ids, draft.parents) == ([5, 6, 7], [-1, 0, 1])
    assert shaping.num_cut_tokens == 3


def test_laws_go_when_the_verifier_does_not_use_them() -> None:
    """To keep them only for drafts that happen to fit would be biased."""
    probs = torch.full((2, V), 1 / V)
    assert shaped(state_of([5, 6], [5, 7]), RequestDraft([5, 6], None, probs))[0].probs is None
    assert shaped(state_of([5, 6], [5, 7]), RequestDraft([5, 9], None, probs))[0].probs is None
    cut = shaped(state_of([5, 6], [5, 7]), RequestDraft([5, 9], None, probs), keeps_laws=True, greedy=True)[0]
    assert (cut.token_ids, cut.probs) == ([5], None), "nothing is drawn at temperature 0"


def test_a_drawn_token_that_is_refused_stays_as_the_last() -> None:
    probs = torch.rand(4, V).softmax(dim=-1)
    draft, shaping = shaped(state_of([5, 6], [5, 7]), RequestDraft([5, 9, 6, 7], None, probs), keeps_laws=True)
    assert (draft.token_ids, draft.num_forced, shaping.num_cut_tokens) == ([5, 9], 0, 2)
    assert draft.probs is not None
    assert torch.equal(draft.probs, probs[:2])
    tree = RequestDraft([9, 5, 8, 6], [-1, -1, 0, 1], probs)
    draft, _ = shaped(state_of([5, 6], [5, 7]), tree, keeps_laws=True)
    assert (draft.token_ids, draft.parents) == ([9, 5, 6], [-1, -1, 1])
    assert draft.probs is not None
    assert torch.equal(draft.probs, probs[[0, 1, 3]])
    draft, _ = shaped(state_of([5, 6, 7]), RequestDraft([5], None, probs[:1]), limit=3, keeps_laws=True)
    assert (draft.token_ids, draft.num_forced) == ([5, 6, 7], 2)
    assert draft.probs is not None
    assert draft.probs[1:, [6, 7]].tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_grammar_that_raises_costs_the_draft() -> None:
    def broken(tokens: tuple[int, ...]) -> list[int]:
        raise RuntimeError("no")

    state = RequestGrammar(RuleGrammar(broken, V, [END]), vocab_size=V, end_token_ids=[END])
    assert shaped(state, RequestDraft([5]))[0] is NO_DRAFT


@settings(deadline=None, max_examples=200)
@given(data=st.data(), texts=st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=5), min_size=1, max_size=4))
def test_any_draft(data: st.DataObject, texts: list[list[int]]) -> None:
    """What is kept is what the grammar takes along its path; chains stay chains, and nothing exceeds the limit."""
    tokens = data.draw(st.lists(st.integers(3, 7), max_size=7))
    tree = data.draw(st.booleans())
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(tokens))] if tree and tokens else None
    limit = data.draw(st.integers(len(tokens), 9))
    draft, _ = shaped(state_of(*texts), RequestDraft(tokens, parents), limit)
    assert len(draft) <= limit
    assert all(state_of(*texts).fitting(draft.token_ids, draft.parents))
    if parents is None and draft.token_ids:
        fits = state_of(*texts).fitting(tokens, None)
        assert draft.token_ids[: sum(fits)] == tokens[: sum(fits)]


# --- the service ----------------------------------------------------------------------------------


class Backend(GrammarBackend):
    name = "test"
    kinds = frozenset({"regex"})

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.seconds = 0.0
        self.num_bytes = 10

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.compiled.append(spec.text)
        time.sleep(self.seconds)
        if spec.text == "bad":
            raise ValueError("position 2: no")
        if spec.text == "worse":
            raise RuntimeError("crash")
        grammar = RuleGrammar(lambda tokens: [5], V, [END])
        grammar.num_bytes = lambda: self.num_bytes  # type: ignore[method-assign]
        return grammar


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def test_each_grammar_is_compiled_once() -> None:
    backend = Backend()
    found = GrammarService(lambda: (backend, "grammar backend 'test'"))
    assert found.compile(regex("a")) is found.compile(regex("a"))
    found.compile(regex("b"))
    assert backend.compiled == ["a", "b"]


def test_threads_share_the_work() -> None:
    backend = Backend()
    backend.seconds = 0.1
    found = GrammarService(lambda: (backend, "x"))
    threads = [threading.Thread(target=found.compile, args=[regex(text)]) for text in "aaabbb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(backend.compiled) == ["a", "b"]


def test_the_cache_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    found = GrammarService(lambda: (backend, "x"))
    monkeypatch.setattr(service, "MOST_BYTES", 25)
    held = found.compile(regex("held"))
    for text in "abc":
        found.compile(regex(text))
    gc.collect()
    assert found.compile(regex("held")) is held, "found as long as somebody holds it"
    found.compile(regex("a"))
    assert backend.compiled == ["held", "a", "b", "c", "a"]


def test_what_is_wrong_is_said() -> None:
    found = GrammarService(lambda: (Backend(), "grammar backend 'test' of toy 1.0"))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.regex bad cannot be used: position 2: no$"):
        found.compile(regex("bad"))
    with pytest.raises(
        InvalidRequestError, match="cannot be compiled by the grammar backend 'test' of toy 1.0: Runtime"
    ):
        found.compile(regex("worse"))
    with pytest.raises(
        InvalidRequestError, match="choice is not known to the grammar backend 'test' of toy 1.0, which"
    ):
        found.compile(GrammarSpec(kind="choice", text='["a"]'))


def test_a_grammar_that_fails_is_not_remembered() -> None:
    found = GrammarService(lambda: (Backend(), "x"))
    with pytest.raises(InvalidRequestError):
        found.compile(regex("bad"))
    assert not found._in_progress


def test_the_testing_backend() -> None:
    tokenizer = tiny_tokenizer(128)
    params = SamplingParams(structured_outputs={"choice": ["no", "none"]})
    found = GrammarService(lambda: (ChoiceBackend(tokenizer, 128, [1]), "x"))
    assert params.structured_outputs is not None
    compiled = found.compile(params.structured_outputs.spec())
    state = found.follow(compiled, params, vocab_size=128, end_token_ids=[1])
    assert state.forced([], 9) == tokenizer.encode("no", add_special_tokens=False)
    assert state.fitting([*tokenizer.encode("none", add_special_tokens=False), 1, 1], None) == [True] * 5 + [False]
