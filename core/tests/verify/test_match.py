"""`match` gives exactly the tokens of decoding without a draft, whatever the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling import rows as rows_module
from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import LogitsPipeline
from specdec.testing.contracts.verifier import VerifierContract
from specdec.types import Draft, Rows, Verdict
from specdec.verify.base import Verifier
from specdec.verify.match import MatchVerifier

V = 9


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestContract(VerifierContract):
    @pytest.fixture
    def verifier(self) -> Verifier:
        return MatchVerifier()


@define(eq=False)
class FakeRequest:
    request_id: str
    params: SamplingParams
    token_ids: np.ndarray
    seed: int = 0
    num_prompt_tokens: int = 2
    stop_token_ids: frozenset[int] = field(factory=lambda: frozenset({8}))


def table_model(tokens: Sequence[int]) -> torch.Tensor:
    """Logits from a table over the last two tokens."""
    generator = torch.Generator().manual_seed(1 + V * int(tokens[-2]) + int(tokens[-1]))
    return torch.randn(V, generator=generator) * 1.5


def depth_first(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Engine:
    """The loop in miniature: scores the draft with the table model, processes, verifies, commits."""

    def __init__(self, verifier: Verifier | None = None, shift: int = 0) -> None:
        self.pipeline = LogitsPipeline(V, "cpu")
        self.verifier = verifier or MatchVerifier()
        self.shift = shift

    def step(
        self,
        requests: Sequence[FakeRequest],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Verdict:
        trees = parents or [list(range(-1, len(d) - 1)) for d in drafts]
        logits = torch.stack(
            [
                table_model([*request.token_ids, *(draft[i] for i in depth_first(tree, node))])
                for request, draft, tree in zip(requests, drafts, trees, strict=True)
                for node in range(-1, len(draft))
            ]
        )
        counts = np.array([len(d) for d in drafts])
        flat = np.array([p for tree in trees for p in tree], dtype=np.int64)
        draft = Draft(
            token_ids=torch.tensor([t for d in drafts for t in d], dtype=torch.int64),
            num_draft_tokens=torch.from_numpy(counts).int(),
            parents=None if parents is None else torch.from_numpy(flat).int(),
        )
        lengths = np.array([len(r.token_ids) for r in requests])
        layout = RowLayout.build(counts, lengths, parents=None if parents is None else flat)
        batch = SamplingBatch.build(requests)
        rows = Rows(
            logits=self.pipeline.process(logits, layout, draft, batch),
            row_start=layout.row_start,
            request_index=layout.request_index,
            positions=layout.positions + self.shift * (layout.positions > layout.positions[0]),
            num_requests=len(requests),
        )
        return self.verifier.verify(rows, draft, batch)

    def decode(
        self, requests: Sequence[FakeRequest], length: int, propose: Callable[[FakeRequest], Any], tree: bool = False
    ) -> None:
        """Decode until every request has ``length`` output tokens; requests that have them sit steps out."""
        while todo := [r for r in requests if len(r.token_ids) < 2 + length]:
            proposals = [propose(r) for r in todo]
            if tree:
                verdict = self.step(todo, [d for d, _ in proposals], [p for _, p in proposals])
            else:
                verdict = self.step(todo, proposals)
            for request, tokens, count in zip(
                todo, verdict.token_ids.tolist(), verdict.num_tokens.tolist(), strict=True
            ):
                assert tokens[count:] == [-1] * (len(tokens) - count)
                request.token_ids = np.append(request.token_ids, tokens[:count])[: 2 + length]


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.9},
    {"temperature": 1.0, "min_tokens": 9, "bad_words_token_ids": [[1, 2], [3]], "logit_bias": {4: 1.0}},
]


def make_requests(seeds: Sequence[int], options: Sequence[dict[str, Any]] = OPTIONS) -> list[FakeRequest]:
    return [
        FakeRequest(f"{seed}-{i}", SamplingParams(max_tokens=None, **o), np.array([1, i % V]), seed)
        for seed in seeds
        for i, o in enumerate(options)
    ]


def outputs(requests: Sequence[FakeRequest]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in requests]


def plain_outputs(seeds: Sequence[int], length: int) -> list[list[int]]:
    requests = make_requests(seeds)
    for request in requests:  # alone, one by one
        Engine().decode([request], length, lambda r: [])
    return outputs(requests)


def right_for(answers: dict[str, list[int]], j: int, k: int) -> Callable[[FakeRequest], list[int]]:
    """An oracle: j right tokens, then wrong ones, k in all."""

    def propose(request: FakeRequest) -> list[int]:
        n = len(request.token_ids)
        right = answers[request.request_id][n : n + k]
        return [t if i < j else (t + 1) % V for i, t in enumerate(right)]

    return propose


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_same_tokens_as_without_a_draft(k: int) -> None:
    """For right, partly right, wrong and random drafts, in a batch of mixed requests and lengths."""
    seeds, length = [0, 7, 2**63 + 5], 20
    plain = plain_outputs(seeds, length)
    answers = {r.request_id: tokens for r, tokens in zip(make_requests(seeds), plain, strict=True)}
    rng = np.random.default_rng(k)
    proposers = [right_for(answers, j, k) for j in (0, 1, k)]
    proposers.append(lambda request: rng.integers(0, V, rng.integers(0, k + 1)).tolist())
    for propose in proposers:
        requests = make_requests(seeds)
        Engine().decode(requests, length, propose)
        assert outputs(requests) == plain


def test_a_right_draft_is_accepted_whole() -> None:
    plain = plain_outputs([3], 13)
    answers = {r.request_id: tokens for r, tokens in zip(make_requests([3]), plain, strict=True)}
    requests = make_requests([3])
    verdict = Engine().step(requests, [right_for(answers, 4, 4)(r) for r in requests])
    assert verdict.num_tokens.tolist() == [5] * len(requests)
    assert verdict.accepted_nodes is None
    verdict = Engine().step(requests, [right_for(answers, 2, 4)(r) for r in requests])
    assert verdict.num_tokens.tolist() == [3] * len(requests)


def random_tree(rng: np.random.Generator, right: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """A random tree that often holds the right path, sometimes twice, among wrong siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    depth = {-1: 0}
    for node in range(size):
        parent = int(rng.integers(-1, node)) if node else -1
        d = depth[parent]
        token = right[d] if d < len(right) and rng.random() < 0.5 else int(rng.integers(0, V))
        tokens.append(int(token))
        parents.append(parent)
        depth[node] = d + 1
    return tokens, parents


def test_same_tokens_with_trees() -> None:
    seeds, length = [0, 11], 20
    plain = plain_outputs(seeds, length)
    answers = {r.request_id: tokens for r, tokens in zip(make_requests(seeds), plain, strict=True)}
    rng = np.random.default_rng(0)
    accepted = []

    def propose(request: FakeRequest) -> tuple[list[int], list[int]]:
        return random_tree(rng, answers[request.request_id][len(request.token_ids) :], int(rng.integers(0, 9)))

    class Watching(MatchVerifier):
        def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
            verdict = super().verify(rows, draft, sampling)
            assert verdict.accepted_nodes is not None
            accepted.append(verdict.num_tokens.max().item() - 1)
            return verdict

    requests = make_requests(seeds)
    Engine(Watching()).decode(requests, length, propose, tree=True)
    assert outputs(requests) == plain
    assert max(accepted) >= 3


def test_accepted_nodes_are_the_matching_path() -> None:
    """The right token at the last sibling; equal siblings: the first of them."""
    requests = make_requests([5], [{"temperature": 0.0}] * 3)
    alone = make_requests([5], [{"temperature": 0.0}] * 3)
    Engine().decode(alone, 4, lambda r: [])
    a, b, c, _ = alone[0].token_ids[2:].tolist()
    x = alone[1].token_ids[2:].tolist()
    wrong = (a + 1) % V
    verdict = Engine().step(
        requests,
        [[wrong, a, (b + 1) % V, b, b, c], [x[0], x[0], x[1]], []],
        [[-1, -1, 1, 1, 1, 3], [-1, -1, 1], []],
    )
    assert verdict.token_ids.dtype == torch.int64
    assert verdict.accepted_nodes is not None
    assert verdict.num_tokens.tolist() == [4, 2, 1]
    assert verdict.accepted_nodes[0, :4].tolist() == [1, 3, 5, -1]
    assert verdict.accepted_nodes[1, :2].tolist() == [0, -1]  # node 2 hangs under the second of the equal siblings
    assert verdict.token_ids[0, :3].tolist() == [a, b, c]


def test_a_chain_as_a_tree_gives_the_chains_verdict() -> None:
    rng = np.random.default_rng(4)
    requests = make_requests([1, 2])
    drafts = [rng.integers(0, 4, rng.integers(0, 6)).tolist() for _ in requests]
    chain = Engine().step(requests, drafts)
    tree = Engine().step(requests, drafts, [list(range(-1, len(d) - 1)) for d in drafts])
    assert torch.equal(chain.num_tokens, tree.num_tokens)
    assert torch.equal(chain.token_ids, tree.token_ids)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    penalty=st.sampled_from([0.0, 0.7]),
    drafts=st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=12, max_size=12),
)
def test_any_seed_any_draft(seed: int, temperature: float, penalty: float, drafts: list[list[int]]) -> None:
    def request() -> FakeRequest:
        params = SamplingParams(temperature=temperature, presence_penalty=penalty, max_tokens=None)
        return FakeRequest("r", params, np.array([0, 1]), seed)

    plain, speculating = request(), request()
    Engine().decode([plain], 12, lambda r: [])
    draft = iter(drafts)
    Engine().decode([speculating], 12, lambda r: next(draft))
    assert outputs([plain]) == outputs([speculating])


def test_neighbours_and_order_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    requests = make_requests([4, 9])
    drafts = [rng.integers(0, V, rng.integers(0, 5)).tolist() for _ in requests]
    together = Engine().step(requests, drafts)
    for order in (list(range(len(requests)))[::-1], rng.permutation(len(requests)).tolist()):
        verdict = Engine().step([requests[i] for i in order], [drafts[i] for i in order])
        assert torch.equal(verdict.token_ids, together.token_ids[order])
    for i, request in enumerate(requests):
        alone = Engine().step([request], [drafts[i]])
        count = int(alone.num_tokens[0])
        assert alone.token_ids[0, :count].tolist() == together.token_ids[i, :count].tolist()


def verify_rows(logits: torch.Tensor, drafts: Sequence[Sequence[int]], temperature: float) -> Verdict:
    requests = make_requests([0], [{"temperature": temperature}] * len(drafts))
    counts = np.array([len(d) for d in drafts])
    layout = RowLayout.build(counts, np.full(len(drafts), 2))
    draft = Draft(
        token_ids=torch.tensor([t for d in drafts for t in d], dtype=torch.int64),
        num_draft_tokens=torch.from_numpy(counts).int(),
    )
    rows = Rows(
        logits=logits,
        row_start=layout.row_start,
        request_index=layout.request_index,
        positions=layout.positions,
        num_requests=len(drafts),
        max_draft_tokens=int(counts.max(initial=0)),
    )
    return MatchVerifier().verify(rows, draft, SamplingBatch.build(requests))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_ends_its_run_with_a_code(temperature: float) -> None:
    """Only for its own request, and only when the row is reached."""
    logits = torch.full((8, V), -50.0)
    logits[torch.arange(8), torch.arange(8)] = 50.0
    logits[1] = torch.nan
    logits[5] = torch.nan
    logits[7] = -torch.inf
    verdict = verify_rows(logits, [[0, 1], [8, 4], [6]], temperature)
    assert verdict.token_ids.tolist() == [[0, NAN_LOGITS, -1], [3, -1, -1], [6, NO_TOKEN_LEFT, -1]]
    assert verdict.num_tokens.tolist() == [2, 1, 2]


def test_the_acceptance_rate_is_the_targets_probability_of_the_draft() -> None:
    count = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0, 2.0, 0.2, 0.1, 0.0, -2.0]).expand(2 * count, -1).contiguous()
    requests = [
        FakeRequest(str(i), SamplingParams(temperature=1.0), np.array([0, 1]), seed=i * 13) for i in range(count)
    ]
    counts = np.ones(count, dtype=np.int64)
    layout = RowLayout.build(counts, np.full(count, 2))
    draft = Draft(token_ids=torch.full((count,), 4), num_draft_tokens=torch.ones(count, dtype=torch.int32))
    rows = Rows(
        logits=logits,
        row_start=layout.row_start,
        request_index=layout.request_index,
        positions=layout.positions,
        num_requests=count,
    )
    rate = float((MatchVerifier().verify(rows, draft, SamplingBatch.build(requests)).num_tokens == 2).float().mean())
    probability = float(logits[0].softmax(0)[4])
    assert abs(rate - probability) < 5 * (probability * (1 - probability) / count) ** 0.5


def test_requests_without_any_draft_in_the_batch() -> None:
    requests = make_requests([0])
    verdict = Engine().step(requests, [[] for _ in requests])
    assert verdict.token_ids.shape == (len(requests), 1)
    assert verdict.num_tokens.tolist() == [1] * len(requests)
    verdict = Engine().step(requests, [[] for _ in requests], [[] for _ in requests])
    assert verdict.accepted_nodes is not None
    assert verdict.accepted_nodes.shape == (len(requests), 0)


# --- the tests can fail ---------------------------------------------------------------------------


def differs_from_plain(engine: Engine, options: dict[str, Any], seeds: Sequence[int] = range(8)) -> bool:
    for seed in seeds:
        plain, speculating = make_requests([seed], [options]), make_requests([seed], [options])
        Engine().decode(plain, 12, lambda r: [])
        answers = {r.request_id: t for r, t in zip(plain, outputs(plain), strict=True)}
        engine.decode(speculating, 12, right_for(answers, 3, 3))
        if outputs(speculating) != outputs(plain):
            return True
    return False


def test_noise_at_the_wrong_position_is_noticed() -> None:
    assert not differs_from_plain(Engine(), {"temperature": 1.0})
    assert differs_from_plain(Engine(shift=1), {"temperature": 1.0})
    assert not differs_from_plain(Engine(shift=1), {"temperature": 0.0})  # no noise there


def test_penalties_that_ignore_the_draft_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 0.0, "frequency_penalty": 2.0}
    assert not differs_from_plain(Engine(), options)

    def nothing(layout: RowLayout, draft: Draft) -> torch.Tensor:
        return torch.full((layout.request_index.shape[0], layout.max_depth), -1, dtype=torch.int64)

    monkeypatch.setattr(rows_module, "drafted_before", nothing)
    assert differs_from_plain(Engine(), options)


def test_accepting_one_token_too_many_is_noticed() -> None:
    class Generous(MatchVerifier):
        def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
            verdict = super().verify(rows, draft, sampling)
            tokens = verdict.token_ids.clone()
            first = rows.row_start[:-1].long() - torch.arange(rows.num_requests)
            tokens[:, 0] = torch.where(draft.num_draft_tokens > 0, draft.token_ids[first.clamp(max=2)], tokens[:, 0])
            return attrs.evolve(verdict, token_ids=tokens)

    plain, speculating = make_requests([0], [{"temperature": 0.0}]), make_requests([0], [{"temperature": 0.0}])
    Engine().decode(plain, 6, lambda r: [])
    Engine(Generous()).decode(speculating, 6, lambda r: [3, 3, 3])
    assert outputs(plain) != outputs(speculating)
