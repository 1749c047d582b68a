"""Drafts and counts equal those of counting every substring, whatever the texts, their order and their removal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import InvalidRequestError
from specdec.testing.strategies import growing_texts
from specdec_suffix import layout, tree
from specdec_suffix.responses import ResponseStore
from specdec_suffix.suffix import SuffixProposer

from .kit import ask, draft, make, respond, start
from .oracle import Counts, Oracle, Place

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
depths = st.integers(1, 7)
factors = st.sampled_from([0.5, 1.0, 1.5, 4.0])
leasts = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])


def expected(
    text: Sequence[int], past: list[list[int]], depth: int, limit: int, factor: float, least: float, trees: bool
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and probabilities of the better of the two oracles' drafts."""
    here = Oracle(Counts([list(text)], depth), is_open=True).draft(text, limit, factor, least, trees)
    there = Oracle(Counts(past, depth), is_open=False).draft(text, limit, factor, least, trees)
    _, tokens, probabilities, parents = there if there[0] > here[0] else here
    return tokens, parents, probabilities


# --- what is proposed ---------------------------------------------------------------------------


def test_most_frequent_continuation() -> None:
    """Twice 7 after 1, 2 and once 8: 7 is proposed, and of two that came once the later one."""
    assert draft(make(1), [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], 1) == [7]
    assert draft(make(1), [1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_length_follows_the_match() -> None:
    """A match of n tokens is worth at most factor * n draft tokens, within the limit."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert draft(make(8), text, 8) == [4, 5, 6]
    assert draft(make(8, factor=2.0), text, 8) == [4, 5, 6, 7, 8, 9]
    assert draft(make(8, factor=2.0), text, 2) == [4, 5]
    assert draft(make(8, factor=0.3), text, 8) == []


def test_improbable_tokens_are_not_proposed() -> None:
    """Five continuations of equal share 0.2 are below 0.25."""
    text = [token for last in range(5) for token in (9, 10 + last)] + [9]
    assert draft(make(1, least=0.25), text, 1) == []
    assert draft(make(1, least=0.2), text, 1) == [14]


def test_long_repetition_goes_past_the_depth() -> None:
    """The depth bounds what is counted, not how long a copied run may be."""
    text = [*range(40), *range(12)]
    assert draft(make(16, depth=4, factor=4.0), text, 16) == list(range(12, 28))


def test_past_responses_are_found() -> None:
    """A response of a completed request serves the next one from its first token on."""
    proposer = make(4)
    respond(proposer, [50, 51], [1, 2, 3, 4, 5, 6])
    start(proposer, "b", [60])
    assert draft(proposer, [60, 1, 2, 3], request_id="b") == [4, 5, 6]


def test_the_end_of_the_prompt_is_stored_with_the_response() -> None:
    """The same prompt again: the beginning of the response is proposed at once."""
    proposer = make(4, suffix_stored_prompt_tokens=2)
    respond(proposer, [50, 51, 52], [1, 2, 3])
    start(proposer, "b", [51, 52])
    assert draft(proposer, [50, 51, 52], request_id="b") == [1, 2]
    assert proposer.stats()["stored_tokens"] == 5


@settings(deadline=None, max_examples=150)
@given(growing_texts(3), st.lists(texts, max_size=5), depths, factors, leasts, st.integers(1, 6), st.booleans())
def test_equals_oracle(
    shown: tuple[np.ndarray, list[int]],
    past: list[list[int]],
    depth: int,
    factor: float,
    least: float,
    k: int,
    trees: bool,
) -> None:
    """A text that grows step by step gets the oracle's draft, parents and probabilities at every step."""
    proposer = make(k, depth, factor, least, suffix_trees=trees)
    for response in past:
        respond(proposer, [0], response)
    text, lengths = shown
    start(proposer, "a", text[:1].tolist())
    for length in lengths:
        now = text[:length].tolist()
        got = ask(proposer, {"a": now}, k)
        tokens, parents, probabilities = expected(now, past, depth, k, factor, least, trees)
        assert got.token_ids.tolist() == tokens
        assert got.confidence is not None
        assert got.confidence.tolist() == np.array(probabilities, dtype=np.float32).tolist()
        assert (got.parents.tolist() if got.parents is not None else list(range(-1, len(tokens) - 1))) == parents


@settings(deadline=None, max_examples=60)
@given(st.lists(growing_texts(3, max_size=40), min_size=2, max_size=4), depths, st.data())
def test_many_requests_at_once(shown: list[tuple[np.ndarray, list[int]]], depth: int, data: st.DataObject) -> None:
    """Requests that grow side by side do not disturb one another, with any limits."""
    proposer = make(5, depth)
    for step in range(max(len(lengths) for _, lengths in shown)):
        now = {f"r{i}": text[: lengths[step]] for i, (text, lengths) in enumerate(shown) if step < len(lengths)}
        limits = [data.draw(st.integers(0, 5)) for _ in now]
        got = ask(proposer, {name: text.tolist() for name, text in now.items()}, limits)
        rows = got.token_ids.split(got.num_draft_tokens.tolist())
        for text, limit, row in zip(now.values(), limits, rows, strict=True):
            assert row.tolist() == expected(text.tolist(), [], depth, limit, 1.0, 0.1, False)[0]


def test_long_text_outgrows_its_room() -> None:
    """A text many times as long as at the first step has the drafts that it would have at once."""
    rng = np.random.default_rng(0)
    text = np.resize(rng.integers(0, 5, 700), 3000)
    text[rng.integers(0, 3000, 300)] = 6
    grown = make(8)
    for end in range(3, 3000, 41):
        assert draft(grown, text[:end].tolist(), 8) == draft(make(8), text[:end].tolist(), 8)


# --- the trie -----------------------------------------------------------------------------------


def patterns(row: np.ndarray, nodes: np.ndarray, root: int, text: Sequence[int], depth: int) -> dict[Any, Any]:
    """Pattern of every node below a root -> count, children by token, the best child's token, latest occurrence."""
    found: dict[Any, Any] = {}
    waiting = [(root, ())]
    while waiting:
        node, pattern = waiting.pop()
        children, child = {}, nodes[node, tree.FIRST_CHILD]
        while child != tree.NONE:
            assert nodes[child, tree.PARENT] == node
            begin = nodes[child, tree.POS]
            label = tuple(text[begin + len(pattern) : begin + nodes[child, tree.DEPTH]])
            assert label[0] == nodes[child, tree.TOKEN]
            children[label[0]] = (*pattern, *label)
            waiting.append((child, (*pattern, *label)))
            child = nodes[child, tree.NEXT]
        best = store_best(row, node)
        token = None if best == tree.NONE else nodes[best, tree.TOKEN]
        found[pattern] = (nodes[node, tree.COUNT], nodes[node, tree.TOTAL], children, token, nodes[node, tree.POS])
    return found


@tree.jit
def store_best(row: np.ndarray, node: int) -> Any:
    return tree.best_child(row, tree.int32_at(row[tree.NODES]), node)


def content(responses: ResponseStore, scope: str = "") -> dict[Any, Any]:
    """The trie of a scope as plain values that do not depend on where things lie."""
    ring = responses._ring.tolist()
    begins = [stored.begin for stored in responses._stored]
    found = patterns(responses.row, responses._trie.nodes, responses.root(scope), ring, responses._depth)
    origin = begins[0] if begins else 0
    size = int(responses.row[tree.RING])
    return {p: (*rest, (int(pos) - origin) % size if p else 0) for p, (*rest, pos) in found.items()}


def filled(past: Sequence[Sequence[int]], depth: int, max_tokens: int = 10_000, **options: Any) -> ResponseStore:
    responses = ResponseStore(depth=depth, max_tokens=max_tokens, **({"max_responses": 1000} | options))
    for response in past:
        responses.add("", np.array(response, dtype=np.int64))
    return responses


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, min_size=1, max_size=5), depths)
def test_counts_equal_oracle(past: list[list[int]], depth: int) -> None:
    """Every node's count is the number of occurrences; nodes stand where patterns branch or texts end, nowhere else."""
    responses = filled(past, depth)
    counts = Counts(past, depth)
    found = content(responses)
    ends = {tuple(text[start:]) for text in past for start in range(max(len(text) - depth + 1, 0), len(text))}
    for pattern, (count, total, children, best, _) in found.items():
        if pattern:
            assert count == len(counts.occurrences[pattern])
        following = counts.next(pattern)
        assert set(children) == {token for token, _ in following}
        assert total == sum(len(counts.occurrences[(*pattern, token)]) for token in children)
        assert best == (following[0][0] if following else None)
        assert not pattern or len(children) != 1 or pattern in ends
    assert set(found) >= ends | {p for p in counts.occurrences if len(p) == depth}


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, min_size=0, max_size=4), depths)
def test_insertion_and_eviction_leave_no_trace(gone: list[list[int]], kept: list[list[int]], depth: int) -> None:
    """After the oldest have left, the trie is the one that the others alone would have made."""
    responses = filled([*gone, *kept], depth)
    for _ in gone:
        responses._evict()
    alone = filled(kept, depth)
    assert [text.tolist() for _, text in responses.responses()] == kept
    assert responses.num_nodes == alone.num_nodes
    if kept:
        assert content(responses) == content(alone)
    else:
        assert responses.num_nodes == responses.num_tokens == responses.num_scopes == 0
        assert not responses._trie._table.any()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(texts, st.sampled_from("ab")), max_size=30), depths, st.integers(1, 90), st.integers(1, 9))
def test_bounds(past: list[tuple[list[int], str]], depth: int, max_tokens: int, max_responses: int) -> None:
    """Bounds hold at any moment, the oldest leave first, and what is left is indexed as if nothing else had been."""
    responses = ResponseStore(depth=depth, max_tokens=max_tokens, max_responses=max_responses)
    for text, scope in past:
        stored = responses.add(scope, np.array(text, dtype=np.int64))
        assert stored == (len(text) < max_tokens)
        assert len(responses) <= max_responses
        assert responses.num_tokens + len(responses) <= max_tokens
        assert responses.num_nodes <= 2 * responses.num_tokens + responses.num_scopes
    left = [(scope, text.tolist()) for scope, text in responses.responses()]
    fitting = [(scope, text) for text, scope in past if len(text) < max_tokens]
    assert left == fitting[len(fitting) - len(left) :]
    for scope in {scope for scope, _ in left}:
        alone = filled([text for name, text in left if name == scope], depth)
        with_pos = content(responses, scope)
        assert {p: v[:-1] for p, v in with_pos.items()} == {p: v[:-1] for p, v in content(alone).items()}


@pytest.mark.parametrize("max_tokens", [0, 1, 3, 4, 5, 21])
def test_small_bounds(max_tokens: int) -> None:
    """Known bug 80: bounds around the depth, and a response that is longer than all of it."""
    proposer = make(4, 4, suffix_max_cached_tokens=max_tokens)
    for _ in range(3):
        respond(proposer, [9], list(range(20)))
        assert proposer.stats()["stored_tokens"] == (20 if max_tokens == 21 else 0)
        assert draft(proposer, [1, 2, 3, 1, 2]) == [3, 1]
        proposer.finish("a")


# --- whose responses ----------------------------------------------------------------------------


def seen_by(proposer: SuffixProposer, **extra_args: Any) -> list[int]:
    """What a request is told after 1, 2."""
    start(proposer, "seen", [60], **extra_args)
    found = draft(proposer, [60, 1, 2], request_id="seen")
    proposer.finish("seen")
    return found


def test_scopes_are_apart() -> None:
    """A response is found in its own scope and in no other."""
    proposer = make()
    respond(proposer, [9], [1, 2, 3, 4], suffix_scope="tenant-a")
    respond(proposer, [9], [1, 2, 5, 6])
    assert seen_by(proposer, suffix_scope="tenant-a") == [3, 4]
    assert seen_by(proposer, suffix_scope="tenant-b") == []
    assert seen_by(proposer) == [5, 6]
    assert proposer.stats()["stored_scopes"] == 2


def test_a_request_can_leave_no_trace() -> None:
    """``suffix_store`` False: nothing of it is kept, but it may read."""
    proposer = make()
    respond(proposer, [9], [1, 2, 3, 4], suffix_store=False)
    assert proposer.stats()["stored_responses"] == 0
    respond(proposer, [9], [1, 2, 3, 4])
    assert seen_by(proposer, suffix_store=False) == [3, 4]


def test_unscoped_requests_can_be_kept_apart() -> None:
    """Without sharing, a request that names no scope neither stores nor reads."""
    proposer = make(suffix_share_unscoped=False)
    respond(proposer, [9], [1, 2, 3, 4])
    respond(proposer, [9], [1, 2, 3, 4], suffix_scope="x")
    assert proposer.stats()["stored_responses"] == 1
    assert seen_by(proposer) == []
    assert seen_by(proposer, suffix_scope="x") == [3, 4]


def test_aborted_requests_are_not_stored() -> None:
    """`finish` alone is an abort or a failure."""
    proposer = make()
    start(proposer, "a", [9])
    draft(proposer, [9, 1, 2, 3, 4])
    proposer.finish("a")
    assert seen_by(proposer) == []


@pytest.mark.parametrize(
    ("extra_args", "told"),
    [
        ({"suffix_scope": 3}, r"extra_args\['suffix_scope'\] is 3; it must be a string of 1 to 256"),
        ({"suffix_scope": ""}, "must be a string of 1 to 256"),
        ({"suffix_store": "no"}, r"extra_args\['suffix_store'\] is 'no'; it must be true or false"),
    ],
)
def test_wrong_request_options(extra_args: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        start(make(), "a", [1], **extra_args)


# --- what is kept -------------------------------------------------------------------------------


def test_another_text_is_indexed_anew() -> None:
    """A text that is shorter than it was, or differs at the end of what is indexed."""
    proposer = make()
    draft(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 1])
    assert draft(proposer, [9, 9, 4, 5, 6, 9, 9]) == [4, 5]
    assert draft(proposer, [8, 2, 3, 8, 2]) == [3, 8]


def test_memory_is_given_back() -> None:
    """At most 160 bytes a token while a request runs, none of it after its end."""
    proposer = make()
    before = dict(proposer.memory())
    text = np.random.default_rng(1).integers(0, 1000, 10_000).tolist()
    draft(proposer, text)
    assert 0 < proposer.memory()["index"] < 160 * 10_000
    proposer.finish("a")
    assert dict(proposer.memory()) == before


def test_rows_are_used_again_and_survive_growth() -> None:
    """Requests that come and go do not make the state grow, and more at once than before keep their texts."""
    proposer = make(2)
    for step in range(60):
        names = [f"r{step + i}" for i in range(20)]
        got = ask(proposer, {name: [1, 2, 1] for name in names}, 2)
        assert got.token_ids.tolist() == [2] * 20
        proposer.finish(names[0])
    assert len(proposer._state) <= 32


def test_many_short_requests() -> None:
    """Known bug 79: 2,000 different requests of 30 tokens and a bound of 5,000; memory is flat in the second half."""
    rng = np.random.default_rng(0)
    proposer = make(4, suffix_max_cached_tokens=5000)
    sizes = []
    for _ in range(2000):
        respond(proposer, [1], rng.integers(0, 500, 30).tolist())
        sizes.append(sum(proposer.memory().values()))
    assert sizes[-1] == sizes[1000]
    assert proposer.stats()["stored_tokens"] <= 5000
    assert sizes[-1] < 200 * 5000 + 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_tokens() -> None:
    """3 million tokens through a store of 1 million: bounded memory, and exact to the end."""
    rng = np.random.default_rng(0)
    responses = ResponseStore(depth=24, max_responses=10_000, max_tokens=1_000_000)
    phrases = [rng.integers(0, 30_000, rng.integers(3, 60)) for _ in range(3000)]
    sizes = []
    for _ in range(6000):
        parts = [phrases[i] for i in rng.integers(0, 3000, 15)] + [rng.integers(0, 30_000, 30)]
        responses.add("", np.concatenate(parts))
        sizes.append(responses.nbytes)
        assert responses.num_tokens <= 1_000_000
        assert responses.num_nodes <= 2 * responses.num_tokens + 1
    assert responses.num_evicted > 3000
    assert sizes[-1] == sizes[4000]
    assert sizes[-1] < 200_000_000
    while len(responses):
        responses._evict()
    assert responses.num_nodes == 0
    assert not responses._trie._table.any()


def test_ties_do_not_depend_on_where_things_lie() -> None:
    """The same responses after a long history, on other node numbers and ring places, give the same drafts."""
    rng = np.random.default_rng(3)
    fresh, used = make(4, 6), make(4, 6, suffix_max_cached_tokens=700, suffix_decoding_max_cached_requests=10)
    for _ in range(200):
        respond(used, [9], rng.integers(0, 3, rng.integers(1, 60)).tolist())
    for _ in range(10):
        response = rng.integers(0, 3, 40).tolist()
        respond(fresh, [9], response)
        respond(used, [9], response)
    for name in ("a", "b", "c", "d"):
        text = rng.integers(0, 3, 12).tolist()
        start(fresh, name, [9])
        start(used, name, [9])
        assert draft(used, text, request_id=name) == draft(fresh, text, request_id=name)


def test_end_marks_are_no_tokens() -> None:
    """A draft never runs from one stored response into the next."""
    proposer = make(8, factor=8.0)
    respond(proposer, [9], [1, 2])
    respond(proposer, [9], [3, 4])
    start(proposer, "a", [5])
    assert draft(proposer, [5, 1], 8) == [2]
    assert layout.END < 0


def test_oracle_is_not_trivial() -> None:
    """The oracle itself, on a case done by hand."""
    oracle = Oracle(Counts([[1, 2, 1, 3, 1]], 4), is_open=True)
    assert oracle.matches([1, 2, 1, 3, 1]) == [Place((1,))]
    assert oracle.draft([1, 2, 1, 3, 1], 4, 1.0, 0.1, False)[:3] == (0.5, [3], [0.5])
