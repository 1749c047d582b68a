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

from specdec.sampling import history, masks, penalties, rows
from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.pipeline import LogitsPipeline
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
}
STOPS = [7, 11]


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
    found = drafted(pipeline or LogitsPipeline(V, "cpu"), requests, drafts, parents)
    trees = parents or [list(range(-1, len(d) - 1)) for d in drafts]
    for request, draft, tree, processed in zip(requests, drafts, trees, found, strict=True):
        for node, row in zip(range(-1, len(draft)), processed, strict=True):
            said = [draft[i] for i in path_to(node, tree)]
            prefix = make_request([], name="plain")
            prefix.params, prefix.num_prompt_tokens = request.params, request.num_prompt_tokens
            prefix.stop_token_ids = request.stop_token_ids
            prefix.token_ids = np.array([*request.token_ids, *said], dtype=np.int64)
            assert torch.equal(row, plain(LogitsPipeline(V, "cpu"), prefix)), (request.params, said)


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
@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if not {"top_k", "top_p", "min_p"} & set(o)])
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
