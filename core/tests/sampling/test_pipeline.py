"""Row i of a draft is processed exactly as plain decoding processes the row after the same tokens, for every option."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import RequestFailedError
from specdec.grammar import RequestGrammar
from specdec.sampling import history, masks, penalties, rows
from specdec.sampling import processor as processor_module
from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.cpu import KERNELS
from specdec.sampling.custom import NamedProcessor
from specdec.sampling.grammar_mask import apply_bitmask_anywhere
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.processor import LogitsProcessor, ProcessorRows
from specdec.testing.grammars import RuleGrammar, RuleMatcher
from specdec.types import Draft

V = 12
PROMPT = [1, 2, 3, 1, 4]
OUTPUT = [5, 1, 5, 6]
DRAFT = [5, 7, 5, 2, 11]

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.8},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {3: 2.0, 5: -100.0}},
    "allowed": {"allowed_token_ids": [1, 5, 7, 9]},
    "bad words": {"bad_words_token_ids": [[5, 7], [6, 5, 7], [7, 5], [2], [5, 6, 5, 7, 5]]},
    "min tokens": {"min_tokens": 6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6, "temperature": 0.7},
    "min-p": {"min_p": 0.2},
    "grammar": {"structured_outputs": {"regex": "test"}},
    "grammar without end tokens": {"structured_outputs": {"regex": "test"}, "ignore_eos": True},
    "grammar and min tokens": {"structured_outputs": {"regex": "test"}, "min_tokens": 7},
    "processor": {"extra_args": {"history": 1.5}},
}
OPTIONS["everything"] = {
    "temperature": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 2.0},
    "allowed_token_ids": [0, 1, 2, 3, 5, 7, 9, 10, 11],
    "bad_words_token_ids": [[5, 7], [2]],
    "min_tokens": 6,
    "top_k": 6,
    "top_p": 0.9,
    "min_p": 0.01,
    "structured_outputs": {"regex": "test"},
    "extra_args": {"history": 0.5},
}
STOPS = [7, 11]
END = 11
"""The end token of the grammar here."""
NOT_BY_HAND = {"top_k", "top_p", "min_p", "structured_outputs", "extra_args"}
BY_HAND = [name for name, options in OPTIONS.items() if not NOT_BY_HAND & set(options)]


def allowed_after(tokens: tuple[int, ...]) -> list[int]:
    """A grammar in which every text has a mask of its own; after 5 7 5 2 nothing but the end is allowed."""
    if tokens[-4:] == (5, 7, 5, 2):
        return [END]
    rng = np.random.default_rng([len(tokens), *tokens])
    return [t for t in range(V) if rng.random() < 0.6 or t in (0, 1, 2, 5, 7)]


def grammar_for(request: Any) -> RequestGrammar | None:
    """The grammar state of a request behind its output, whatever that is."""
    if request.params.structured_outputs is None:
        return None
    output = tuple(request.token_ids[request.num_prompt_tokens :].tolist())
    rule = RuleGrammar(lambda tokens: allowed_after(output + tokens), V, [END])
    return RequestGrammar(rule, vocab_size=V, end_token_ids=[END], ignore_eos=request.params.ignore_eos)


class HistoryProcessor(LogitsProcessor):
    """Changes each row by an amount that depends on everything before it."""

    def applies(self, params: Any) -> bool:
        return "history" in params.extra_args

    def process(self, logits: torch.Tensor, rows: ProcessorRows) -> None:
        assert logits.shape == (rows.num_rows, V)
        for row in range(rows.num_rows):
            r = int(rows.request_index[row])
            before = rows.tokens_before(row)
            assert len(before) == rows.num_prompt_tokens[r] + rows.num_output_tokens[row]
            noise = np.random.default_rng([len(before), *before.tolist()]).normal(size=V)
            logits[row] += torch.from_numpy(noise * rows.params[r].extra_args["history"]).float()


def new_pipeline() -> LogitsPipeline:
    return LogitsPipeline(V, "cpu", [NamedProcessor(HistoryProcessor(), "logits processor 'history' of toy 1.0")])


def by_hand(logits: list[float], prompt: list[int], output: list[int], options: dict[str, Any]) -> list[float]:
    """One row in plain Python, without top-k, top-p and min-p (tested elsewhere)."""
    row = list(logits)
    if "allowed_token_ids" in options:
        row = [x if t in options["allowed_token_ids"] else -math.inf for t, x in enumerate(row)]
    for token, bias in options.get("logit_bias", {}).items():
        row[token] += bias
    for word in options.get("bad_words_token_ids", []):
        if len(word) == 1 or output[-(len(word) - 1) :] == list(word[:-1]):
            row[word[-1]] = -math.inf
    if len(output) < options.get("min_tokens", 0):
        for token in STOPS:
            row[token] = -math.inf
    counts = Counter(output)
    for token in range(len(row)):
        if token in counts or token in prompt:
            factor = options.get("repetition_penalty", 1.0)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if counts[token]:
            row[token] -= options.get("frequency_penalty", 0.0) * counts[token]
            row[token] -= options.get("presence_penalty", 0.0)
    return row


def logits_after(tokens: Sequence[int], vocab_size: int = V) -> torch.Tensor:
    """A toy model: logits that are a function of the whole prefix."""
    seed = 0
    for token in tokens:
        seed = (seed * 31 + int(token) + 1) % (2**31)
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def plain(pipeline: LogitsPipeline, request: Any) -> torch.Tensor:
    """Process the one row of a request without a draft."""
    layout = RowLayout.build(np.array([0]), np.array([len(request.token_ids)]))
    draft = Draft(token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(1, dtype=torch.int32))
    row = logits_after(request.token_ids)[None]
    request.grammar = grammar_for(request)
    return pipeline.process(row, layout, draft, SamplingBatch.build([request]))[0]


def depths_of(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def drafted(
    pipeline: LogitsPipeline,
    requests: Sequence[Any],
    drafts: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None = None,
) -> list[list[torch.Tensor]]:
    """Process all rows of all requests at once; per request the row of the last token and of each node."""
    trees = parents or [list(range(-1, len(d) - 1)) for d in drafts]
    raw = [
        logits_after([*request.token_ids, *(draft[i] for i in path_to(node, tree))])
        for request, draft, tree in zip(requests, drafts, trees, strict=True)
        for node in range(-1, len(draft))
    ]
    counts = np.array([len(d) for d in drafts])
    flat_parents = np.array([p for tree in trees for p in tree], dtype=np.int64)
    draft = Draft(
        token_ids=torch.tensor([t for d in drafts for t in d], dtype=torch.int64),
        num_draft_tokens=torch.from_numpy(counts).int(),
        parents=None if parents is None else torch.from_numpy(flat_parents).int(),
    )
    layout = RowLayout.build(
        counts, np.array([len(r.token_ids) for r in requests]), parents=None if parents is None else flat_parents
    )
    for request in requests:
        request.grammar = grammar_for(request)
    logits = torch.stack(raw)
    before = logits.clone()
    processed = pipeline.process(logits, layout, draft, SamplingBatch.build(requests))
    assert torch.equal(logits, before)
    return [list(part) for part in processed.split((counts + 1).tolist())]


def check_rows(
    make_request: Any,
    requests: Sequence[Any],
    drafts: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None = None,
    pipeline: LogitsPipeline | None = None,
) -> None:
    """Every row equals the plain path's, bit by bit, on the explicit prefix."""
    found = drafted(pipeline or new_pipeline(), requests, drafts, parents)
    trees = parents or [list(range(-1, len(d) - 1)) for d in drafts]
    for request, draft, tree, processed in zip(requests, drafts, trees, found, strict=True):
        for node, row in zip(range(-1, len(draft)), processed, strict=True):
            said = [draft[i] for i in path_to(node, tree)]
            prefix = make_request([], name="plain")
            prefix.params, prefix.num_prompt_tokens = request.params, request.num_prompt_tokens
            prefix.stop_token_ids = request.stop_token_ids
            prefix.token_ids = np.array([*request.token_ids, *said], dtype=np.int64)
            if request.grammar is None or (all(request.grammar.fitting(said, None)) and END not in said):
                assert torch.equal(row, plain(new_pipeline(), prefix)), (request.params, said)
            # Behind the end, or a token that the grammar refuses, a row does not matter: it is never reached.


@pytest.fixture(params=[False, True], ids=["compiled", "torch"])
def any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the compiled stages, and with those that other devices use."""
    if request.param:

        def apply(self: Any, logits: torch.Tensor, step: rows.StepRows, index: np.ndarray, slots: np.ndarray) -> None:
            penalties.apply_penalties(logits, step, index, slots, self._counts.table)

        monkeypatch.setattr(penalties.Penalties, "_apply_on_cpu", apply)


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", OPTIONS)
def test_chain_rows_equal_plain_rows(make_request: Any, name: str) -> None:
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    for k in range(len(DRAFT) + 1):
        check_rows(make_request, [request], [DRAFT[:k]])


TREE = [-1, -1, 0, 1, 1, 0, 4]
TREE_TOKENS = [5, 5, 7, 7, 2, 7, 11]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", OPTIONS)
def test_tree_rows_equal_plain_rows(make_request: Any, name: str) -> None:
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    check_rows(make_request, [request], [TREE_TOKENS], [TREE])
    check_rows(make_request, [request], [DRAFT], [[-1, 0, 1, 2, 3]])


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", BY_HAND)
def test_plain_rows_equal_a_computation_by_hand(make_request: Any, name: str) -> None:
    for output in ([], [5], OUTPUT, [*OUTPUT, 5, 7], [*OUTPUT, 5, 7, 5, 2]):
        request = make_request(PROMPT, output, stops=STOPS, **OPTIONS[name])
        raw = logits_after(request.token_ids)
        expected = by_hand(raw.double().tolist(), PROMPT, output, OPTIONS[name])
        found = plain(LogitsPipeline(V, "cpu"), request)
        torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.usefixtures("any_device")
def test_a_batch_of_everything(make_request: Any) -> None:
    """Requests with and without each option, drafts of several lengths, chains and trees."""
    requests = [
        make_request(PROMPT, OUTPUT, stops=STOPS, name=str(i), **options)
        for i, options in enumerate([{}, {"temperature": 0}, *OPTIONS.values()])
    ]
    drafts = [DRAFT[: i % 6] for i in range(len(requests))]
    check_rows(make_request, requests, drafts)
    trees = [TREE[: i % 8] for i in range(len(requests))]
    check_rows(make_request, requests, [TREE_TOKENS[: i % 8] for i in range(len(requests))], trees)


options_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=4),
        "allowed_token_ids": st.sets(st.integers(0, V - 1), min_size=3).map(sorted),
        "bad_words_token_ids": st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), max_size=4),
        "min_tokens": st.integers(0, 12),
        "top_k": st.integers(0, V),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "structured_outputs": st.just({"regex": "test"}),
        "extra_args": st.fixed_dictionaries({"history": st.floats(0.1, 2.0)}),
    },
)
token_lists = st.lists(st.integers(0, 4), max_size=6)


@settings(deadline=None, max_examples=150)
@given(
    data=st.data(),
    everyone=st.lists(st.tuples(options_strategy, token_lists, token_lists), min_size=1, max_size=4),
    tree=st.booleans(),
)
def test_any_options_any_draft(make_request: Any, data: st.DataObject, everyone: list[Any], tree: bool) -> None:
    requests = [
        make_request([1, 2], output, stops=STOPS, name=str(i), vocab_size=V, **options)
        for i, (options, output, _) in enumerate(everyone)
    ]
    drafts = [draft for _, _, draft in everyone]
    parents = [[data.draw(st.integers(-1, i - 1)) for i in range(len(d))] for d in drafts] if tree else None
    check_rows(make_request, requests, drafts, parents)


# --- state over steps -----------------------------------------------------------------------------


@pytest.mark.usefixtures("any_device")
def test_counts_follow_the_committed_tokens(make_request: Any) -> None:
    """Over many steps with drafts that are partly rejected, with preemption, growth, and tokens taken back."""
    pipeline = LogitsPipeline(V, "cpu")
    options = OPTIONS["all penalties"]
    rng = np.random.default_rng(0)
    requests = [make_request(PROMPT, [], name=str(i), **options) for i in range(6)]
    for step in range(25):
        present = [r for i, r in enumerate(requests) if (step + i) % 4]
        drafts = [rng.integers(0, V, rng.integers(0, 4)).tolist() for _ in present]
        check_rows(make_request, present, drafts, pipeline=pipeline)
        for request, draft in zip(present, drafts, strict=True):
            new = [*draft[: rng.integers(0, len(draft) + 1)], rng.integers(0, V)]
            request.token_ids = np.concatenate([request.token_ids, new]).astype(np.int64)
        if step == 10:  # taken back, as after a fault
            requests[1].token_ids = requests[1].token_ids[: len(PROMPT) + 2]
            requests[2].token_ids = requests[2].token_ids[: len(PROMPT)]
            requests[3].token_ids = np.append(requests[3].token_ids[:-1], (requests[3].token_ids[-1] + 1) % V)
    pipeline.forget("3")
    requests[3] = make_request([7, 8], [9], name="3", **options)
    check_rows(make_request, requests, [[9]] * 6, pipeline=pipeline)


def test_the_cost_of_counting_does_not_grow_with_the_output(make_request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each committed token is counted once; a step adds only what is new."""
    counted = []
    original = penalties.TokenCounts._count_output

    def watch(self: Any, cells: list[np.ndarray]) -> None:
        counted.append(sum(map(len, cells)))
        original(self, cells)

    monkeypatch.setattr(penalties.TokenCounts, "_count_output", watch)
    pipeline = LogitsPipeline(V, "cpu")
    request = make_request(PROMPT, [], presence_penalty=0.5)
    for _ in range(50):
        plain(pipeline, request)
        request.token_ids = np.append(request.token_ids, [3, 4])
    assert counted == [0] + [2] * 49


def test_forgetting_frees_everything(make_request: Any) -> None:
    pipeline = LogitsPipeline(V, "cpu")
    for i in range(40):
        request = make_request(PROMPT, OUTPUT, stops=STOPS, name=str(i), **OPTIONS["everything"])
        plain(pipeline, request)
        pipeline.forget(request.request_id)
        pipeline.forget("never seen")
    stages = {type(stage).__name__: stage for stage in pipeline._stages}
    assert stages["Penalties"]._counts.table.shape[0] == 4  # type: ignore[attr-defined]
    assert not stages["Penalties"]._counts._counted  # type: ignore[attr-defined]
    assert not stages["TokenBias"]._biases._kept  # type: ignore[attr-defined]
    assert not stages["BadWords"]._banned._kept  # type: ignore[attr-defined]
    assert not stages["MinTokens"]._stops._kept  # type: ignore[attr-defined]


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_happens_without_options(make_request: Any, temperature: float) -> None:
    """Also not a copy to float32: the sampler reads the model's dtype, and divides by the temperature itself."""
    requests = [make_request(PROMPT, OUTPUT, name=str(i), temperature=temperature) for i in range(3)]
    logits = torch.randn(3, V).bfloat16()
    layout = RowLayout.build(np.zeros(3, dtype=np.int64), np.full(3, 9))
    draft = Draft(token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(3, dtype=torch.int32))
    assert LogitsPipeline(V, "cpu").process(logits, layout, draft, SamplingBatch.build(requests)) is logits


def test_options_that_cannot_matter_cost_nothing(make_request: Any) -> None:
    """top-k at temperature 0; min_tokens once they are reached."""
    requests = [
        make_request(PROMPT, OUTPUT, name="a", temperature=0, top_k=5, top_p=0.3, min_p=0.1),
        make_request(PROMPT, OUTPUT, name="b", temperature=0, min_tokens=len(OUTPUT), stops=STOPS),
    ]
    logits = torch.randn(2, V)
    layout = RowLayout.build(np.zeros(2, dtype=np.int64), np.full(2, 9))
    draft = Draft(token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(2, dtype=torch.int32))
    pipeline = LogitsPipeline(V, "cpu")
    assert pipeline.process(logits, layout, draft, SamplingBatch.build(requests)) is logits
    requests[1].token_ids = requests[1].token_ids[:-1]
    assert pipeline.process(logits, layout, draft, SamplingBatch.build(requests)) is not logits


def test_end_tokens_outside_the_vocabulary(make_request: Any) -> None:
    """Known bug 25: an end token that no logit stands for is simply never chosen."""
    request = make_request(PROMPT, [], stops=[V + 5, 2], min_tokens=3)
    row = plain(LogitsPipeline(V, "cpu"), request)
    assert (row == -torch.inf).nonzero()[:, 0].tolist() == [2]


# --- grammars and processors ----------------------------------------------------------------------


def expected_mask(prefix: Sequence[int], *, ignore_eos: bool = False) -> list[int]:
    allowed = allowed_after(tuple(prefix))
    return allowed if allowed == [END] or not ignore_eos else [t for t in allowed if t != END]


def left(row: torch.Tensor) -> list[int]:
    return (row > -torch.inf).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_each_row_has_the_mask_of_its_path(make_request: Any, ignore_eos: bool) -> None:
    """Chains, trees and the bonus row, against the grammar itself; behind the end everything is allowed."""
    request = make_request(
        PROMPT, OUTPUT, stops=STOPS, structured_outputs={"regex": "test"}, ignore_eos=ignore_eos, temperature=0
    )
    (rows_of_chain,) = drafted(new_pipeline(), [request], [DRAFT])
    for depth, row in enumerate(rows_of_chain[:-1]):
        assert left(row) == expected_mask([*OUTPUT, *DRAFT[:depth]], ignore_eos=ignore_eos)
    assert left(rows_of_chain[4]) == [END]
    assert left(rows_of_chain[5]) == list(range(V)), "behind the end"
    (rows_of_tree,) = drafted(new_pipeline(), [request], [TREE_TOKENS], [TREE])
    for node, row in zip(range(-1, len(TREE)), rows_of_tree, strict=True):
        said = [TREE_TOKENS[i] for i in path_to(node, TREE)]
        if END not in said:
            assert left(row) == expected_mask([*OUTPUT, *said], ignore_eos=ignore_eos)


def test_min_tokens_give_way_where_the_grammar_is_at_its_end(make_request: Any) -> None:
    request = make_request(PROMPT, [5, 7, 5], stops=[END], structured_outputs={"regex": "test"}, min_tokens=16)
    first, last = drafted(new_pipeline(), [request], [[2]])[0]
    assert left(first) == [t for t in expected_mask([5, 7, 5]) if t != END]
    assert left(last) == [END]


def test_masks_in_plain_torch_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 31, 32, 33, 1000):
        logits = torch.randn(5, vocab_size, generator=generator)
        words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int().numpy()
        words[1], words[2, 0] = -1, 0
        rows_masked = np.array([0, 3, 4])
        found, expected = logits.clone(), logits.clone()
        apply_bitmask_anywhere(found, rows_masked, words)
        KERNELS.function("apply_bitmask")(expected.numpy(), rows_masked, words)
        assert torch.equal(found, expected)
        for row, word in zip(rows_masked, words, strict=True):
            bits = np.unpackbits(word.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
            assert np.array_equal(left(found[row]), bits.nonzero()[0])
        assert torch.equal(found[1:3], logits[1:3])


class Spoilt(HistoryProcessor):
    def process(self, logits: torch.Tensor, rows: ProcessorRows) -> None:
        raise RuntimeError("no")


def test_a_processor_that_raises_fails_only_its_requests(make_request: Any) -> None:
    pipeline = LogitsPipeline(V, "cpu", [NamedProcessor(Spoilt(), "logits processor 'spoilt' of toy 1.0")])
    requests = [
        make_request(PROMPT, OUTPUT, name="free", temperature=0),
        make_request(PROMPT, OUTPUT, name="fails", temperature=0, extra_args={"history": 1.0}),
    ]
    free, fails = drafted(pipeline, requests, [DRAFT[:2], DRAFT[:1]])
    assert not torch.stack(free).isnan().any()
    assert torch.stack(fails).isnan().all()
    assert isinstance(pipeline.faults["fails"], RequestFailedError)
    assert str(pipeline.faults["fails"]) == (
        "The logits processor 'spoilt' of toy 1.0 raised RuntimeError in process(): no"
    )
    assert list(pipeline.faults) == ["fails"]
    pipeline.forget("fails")
    assert not pipeline.faults


def test_a_grammar_that_raises_fails_only_its_request(make_request: Any) -> None:
    def broken(tokens: tuple[int, ...]) -> list[int]:
        if len(tokens) > 0:
            raise RuntimeError("no")
        return list(range(V))

    request = make_request(PROMPT, OUTPUT, name="fails", structured_outputs={"regex": "test"})
    pipeline = new_pipeline()
    layout = RowLayout.build(np.array([1, 0]), np.array([9, 9]))
    draft = Draft(token_ids=torch.tensor([1]), num_draft_tokens=torch.tensor([1, 0], dtype=torch.int32))
    request.grammar = RequestGrammar(RuleGrammar(broken, V, [END]), vocab_size=V, end_token_ids=[END])
    batch = SamplingBatch.build([request, make_request(PROMPT, OUTPUT, name="free")])
    processed = pipeline.process(torch.randn(3, V), layout, draft, batch)
    assert processed.isnan().all(dim=1).tolist() == [True, True, False]
    assert "RuntimeError: no" in str(pipeline.faults["fails"])


def test_a_processor_that_applies_to_nobody_costs_nothing(make_request: Any) -> None:
    request = make_request(PROMPT, OUTPUT, temperature=0)
    logits = torch.randn(1, V)
    layout = RowLayout.build(np.zeros(1, dtype=np.int64), np.full(1, 9))
    draft = Draft(token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(1, dtype=torch.int32))
    assert new_pipeline().process(logits, layout, draft, SamplingBatch.build([request])) is logits


# --- the tests can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["presence", "repetition", "frequency", "bad words"])
def test_ignoring_drafted_tokens_is_noticed(make_request: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def nothing(layout: RowLayout, draft: Draft) -> torch.Tensor:
        return torch.full((layout.request_index.shape[0], layout.max_depth), -1, dtype=torch.int64)

    monkeypatch.setattr(rows, "drafted_before", nothing)
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    with pytest.raises(AssertionError):
        check_rows(make_request, [request], [DRAFT])


@pytest.mark.parametrize("name", ["presence", "frequency", "bad words"])
def test_seeing_a_token_too_many_is_noticed(make_request: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Row i must not see draft token i."""
    original = history.drafted_before

    def late(layout: RowLayout, draft: Draft) -> torch.Tensor:
        return original(layout, draft).roll(-1, dims=0)

    monkeypatch.setattr(rows, "drafted_before", late)
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    with pytest.raises(AssertionError):
        check_rows(make_request, [request], [DRAFT])


def test_min_tokens_by_the_committed_length_is_noticed(make_request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def for_all_rows(self: masks.MinTokens, logits: torch.Tensor, step: rows.StepRows) -> None:
        for r in self.indices(step.batch):
            logits[step.rows_of(r)][:, self._stops.get(step.batch.requests[r])] = -torch.inf

    monkeypatch.setattr(masks.MinTokens, "apply", for_all_rows)
    request = make_request(PROMPT, OUTPUT, stops=STOPS, min_tokens=6)
    check_rows(make_request, [request], [DRAFT[:1]])
    with pytest.raises(AssertionError):
        check_rows(make_request, [request], [DRAFT])


@pytest.mark.parametrize("name", ["grammar", "processor"])
def test_looking_at_the_committed_tokens_alone_is_noticed(
    make_request: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A mask for the first row used for all, or a processor that sees no draft tokens."""

    def fill(self: RequestGrammar, tokens: Any, parents: Any, masks: np.ndarray) -> None:
        masks[:] = self._new_mask()

    monkeypatch.setattr(RequestGrammar, "fill", fill)
    monkeypatch.setattr(processor_module, "_paths", lambda tokens, parents: [[] for _ in range(len(tokens) + 1)])
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    check_rows(make_request, [request], [[]])
    with pytest.raises(AssertionError):
        check_rows(make_request, [request], [DRAFT])


@pytest.mark.parametrize("name", ["grammar", "processor"])
def test_a_tree_treated_as_a_chain_is_noticed(make_request: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Known bug 40: one mask per depth, or per place in the list of nodes."""
    original = rows.StepRows.draft_of
    monkeypatch.setattr(rows.StepRows, "draft_of", lambda self, r: (original(self, r)[0], None))
    request = make_request(PROMPT, OUTPUT, stops=STOPS, **OPTIONS[name])
    with pytest.raises(AssertionError):
        check_rows(make_request, [request], [TREE_TOKENS], [TREE])


def test_a_grammar_that_is_not_rolled_back_is_noticed(make_request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuleMatcher, "rollback", lambda self, num_tokens: None)
    with pytest.raises(AssertionError):
        test_each_row_has_the_mask_of_its_path(make_request, False)
