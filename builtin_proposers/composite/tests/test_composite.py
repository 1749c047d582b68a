"""Members are asked in order, chosen by requests, counted, and contained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.drafting import Proposer
from specdec.errors import ConfigError, InvalidRequestError, PluginNotFoundError
from specdec.registry import Registry
from specdec.speculation import RequestSpeculation
from specdec.testing import (
    OracleProposer,
    RaisingProposer,
    WrongProposer,
    chain_draft,
    engine_context,
    tiny_model,
    use_proposer,
)
from specdec.types import Draft, DraftOutcome, Needs, ProposalInput, ProposerCapabilities, RequestInfo
from specdec_composite import composite as composite_module
from specdec_composite import member as member_module
from specdec_composite.composite import CompositeProposer
from specdec_composite.config import CompositeConfig
from specdec_composite.member import Member
from specdec_composite.plugin import propose
from specdec_composite.worth import Worth

VOCAB = 128
PROMPTS = [[7] * 24, [5, 9, 5, 9, 5, 9, 11], [3], [100, 101, 102, 103] * 8]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    model = str(tiny_model("llama", tmp_path_factory.mktemp("model") / "llama", vocab_size=VOCAB, eos_token_id=None))
    settings = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": "4MiB", "stat_loggers": ()}
    return lambda **more: LLM(model, **(settings | more))


@pytest.fixture(scope="module")
def plain(start: Callable[..., LLM]) -> list[list[int]]:
    with start() as llm:
        return _tokens(llm)


def _tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False, **more)]


def _runs(plain: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, plain, strict=True)]


def _composite(*proposers: Proposer, choose: Any = "first", k: int = 4) -> CompositeProposer:
    names = "abc"
    members = [
        Member(one, name=names[i], label=names[i], max_draft_tokens=k, max_faults=3) for i, one in enumerate(proposers)
    ]
    return CompositeProposer(members, choose=choose, vocab_size=VOCAB)


def _batch(*rows: list[int], k: int = 4, ids: str = "xyz") -> ProposalInput:
    return ProposalInput(
        request_ids=tuple(ids[: len(rows)]),
        token_ids=tuple([np.array(row) for row in rows]),
        max_draft_tokens=np.full(len(rows), k, dtype=np.int32),
    )


class _Fixed(Proposer):
    """Drafts a fixed number of fixed tokens for texts that end in ``trigger``; remembers how it was called."""

    def __init__(self, token: int, trigger: int | None = None, length: int = 2, needs: Needs | None = None) -> None:
        self.token, self.trigger, self.length = token, trigger, length
        self.needs = needs or Needs()
        self.calls: list[tuple[str, ...]] = []
        self.outcomes: list[DraftOutcome] = []

    def propose(self, batch: ProposalInput) -> Draft:
        self.calls.append(batch.request_ids)
        return chain_draft(
            [
                [self.token] * min(self.length, limit) if self.trigger in (None, tokens[-1]) else []
                for tokens, limit in zip(batch.token_ids, batch.max_draft_tokens.tolist(), strict=True)
            ]
        )

    def record(self, outcome: DraftOutcome) -> None:
        self.outcomes.append(outcome)


class _Drawn(_Fixed):
    """Says that its tokens were drawn from a law."""

    capabilities = ProposerCapabilities(draft_probs=True)

    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        law = torch.full((len(draft.token_ids), VOCAB), 1 / VOCAB)
        return Draft(token_ids=draft.token_ids, num_draft_tokens=draft.num_draft_tokens, draft_probs=law)


def _outcome(
    ids: tuple[str, ...], drafted: Any, accepted: Any, parents: tuple[list[int] | None, ...] | None = None
) -> DraftOutcome:
    chains = (None,) * len(ids)
    return DraftOutcome(
        request_ids=ids, num_draft_tokens=drafted, num_accepted_tokens=accepted, parents=parents or chains
    )


def test_the_first_draft_that_is_not_empty_wins() -> None:
    first, second = _Fixed(1, trigger=50), _Fixed(2)
    draft = _composite(first, second).propose(_batch([50], [51], [50]))
    assert draft.token_ids.tolist() == [1, 1, 2, 2, 1, 1]
    assert second.calls == [("y",)], "only the request that was left is asked about"


def test_the_most_promising_draft_wins() -> None:
    """Two tokens promise more than one, until they turn out to be wrong."""
    composite = _composite(_Fixed(1, length=1), _Fixed(2, length=2), choose="best")
    assert composite.propose(_batch([50])).token_ids.tolist() == [2, 2]
    for _ in range(20):
        composite.record(_outcome(("x",), np.array([2]), np.array([0])))
    assert composite.propose(_batch([50])).token_ids.tolist() == [1]


class _Clock:
    """Stands in for the module `time`, so that drafts cost what a test says, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    for module in (composite_module, member_module):
        monkeypatch.setattr(module, "time", made)
    return made


class _Slow(_Fixed):
    """Takes 4 ms for each request."""

    clock: _Clock

    def propose(self, batch: ProposalInput) -> Draft:
        self.clock.now += 0.004 * len(batch.request_ids)
        return super().propose(batch)


def _slow(clock: _Clock) -> _Slow:
    made = _Slow(2, length=4)
    made.clock = clock
    return made


def _steps(composite: CompositeProposer, rows: list[list[int]], count: int, step_seconds: float) -> list[list[int]]:
    """Propose ``count`` times; of each draft the first token is accepted. The drafts' tokens."""
    batch, drafts = attrs.evolve(_batch(*rows), step_seconds=step_seconds), []
    for _ in range(count):
        draft = composite.propose(batch)
        drafts.append(draft.token_ids.tolist())
        drafted = draft.num_draft_tokens.numpy()
        some = np.flatnonzero(drafted)
        ids = tuple([batch.request_ids[i] for i in some])
        accepted = np.ones(len(some), dtype=np.int64)
        composite.record(_outcome(ids, drafted[some], accepted))
    return drafts


@pytest.mark.parametrize(("step_seconds", "asked"), [(1.0, range(30, 31)), (0.001, range(1, 20))])
def test_a_member_is_asked_while_its_drafts_are_worth_their_time(
    clock: _Clock, step_seconds: float, asked: range
) -> None:
    """The same drafts are worth much beside steps of a second, and nothing beside steps of a millisecond."""
    lookup, model = _Fixed(1, trigger=50, length=1), _slow(clock)
    drafts = _steps(_composite(lookup, model, choose="best"), [[51]], 30, step_seconds)
    assert len(model.calls) in asked
    assert (drafts[-1] == [2] * 4) == (step_seconds == 1.0)
    assert len(lookup.calls) == 30


def test_a_promising_draft_in_hand_saves_asking_a_costly_member(clock: _Clock) -> None:
    lookup, model = _Fixed(1, trigger=50, length=4), _slow(clock)
    composite = _composite(lookup, model, choose="best")
    _steps(composite, [[50], [51]], 10, 0.1)
    assert set(model.calls) == {("y",)}, "only where the lookup has nothing"


def test_a_member_that_is_not_asked_is_tried_now_and_then(clock: _Clock) -> None:
    model = _slow(clock)
    composite = _composite(_Fixed(1, length=1), model, choose="best")
    drafts = _steps(composite, [[50], [50]], 160, 0.001)
    assert model.calls[0] == ("x", "y")
    assert 2 <= len(model.calls) <= 30
    assert model.calls[-1] == ("x",), "for one request"
    assert [2, 2, 2, 2, 1] in drafts[60:], "its draft is used, or nothing would be learned"


def test_the_reservation_value_by_hand() -> None:
    worth = Worth(2)
    assert worth.reservation(100.0) == pytest.approx(0.7 + 0.7 * 0.7), "free and as likely as the priors say"
    worth.record_drafts(np.array([2, 0, 0, 0]), seconds=0.2)
    found = (1 + 0.7 * 2) / (4 + 2)
    assert worth.reservation(10.0) == pytest.approx(1.19 - 10.0 * 0.05 / found)
    worth.record_outcomes(np.array([2]), np.array([1]))
    first, second = (1 + 1.4) / 3, 1.4 / 3
    assert worth.expected_tokens().tolist() == pytest.approx([0, first, first + first * second])


@pytest.mark.parametrize("length", [1, 3])
def test_drawn_tokens_are_not_preferred_for_the_length_of_their_draft(length: int) -> None:
    """Where a drawn draft ends may depend on its tokens, which would then no longer have the law they came with."""
    composite = _composite(_Fixed(1, length=2), _Drawn(2, length=length), choose="best")
    assert composite.propose(_batch([50])).token_ids.tolist() == [2] * length


def test_a_request_chooses_its_member() -> None:
    composite = _composite(_Fixed(1), _Fixed(2))
    info = {"prompt_token_ids": np.array([1]), "sampling": GREEDY, "seed": 0}
    composite.start(RequestInfo(request_id="x", speculation=RequestSpeculation(method="b"), **info))
    composite.start(RequestInfo(request_id="y", **info))
    assert composite.propose(_batch([50], [50])).token_ids.tolist() == [2, 2, 1, 1]
    assert composite.methods == ("a", "b")


def test_a_member_that_follows_every_step_is_always_called() -> None:
    follower = _Fixed(2, needs=Needs(every_step=True, lookahead_slots=3))
    composite = _composite(_Fixed(1), follower)
    composite.propose(_batch([50]))
    assert follower.calls == [()]
    assert composite.needs == Needs(every_step=True, lookahead_slots=3)


def test_members_count_trees_by_depth() -> None:
    composite = _composite(_Fixed(1, trigger=50), _Fixed(2))
    composite.propose(_batch([50], [51]))
    composite.record(_outcome(("y", "x"), np.array([4, 1]), np.array([2, 1]), ([-1, -1, 0, 0], None)))
    members = composite.stats()["members"]
    assert members["a"]["num_draft_tokens_per_pos"] == [1]
    assert members["b"]["num_draft_tokens_per_pos"] == [2, 2]
    assert members["b"]["num_accepted_tokens_per_pos"] == [1, 1]


def test_members_hear_of_their_own_drafts() -> None:
    first, second = _Fixed(1, trigger=50), _Fixed(2)
    composite = _composite(first, second)
    composite.propose(_batch([50], [51]))
    composite.record(_outcome(("y", "x"), np.array([2, 1]), np.array([0, 1])))
    assert [outcome.request_ids for outcome in first.outcomes] == [("x",)]
    assert second.outcomes[0].num_accepted_tokens.tolist() == [0]
    members = composite.stats()["members"]
    assert (members["a"]["num_draft_tokens"], members["a"]["num_accepted_tokens_per_pos"]) == (1, [1])
    assert (members["b"]["num_draft_tokens"], members["b"]["num_accepted_tokens_per_pos"]) == (2, [0, 0])


def test_a_draft_with_laws_beside_one_without() -> None:
    draft = _composite(_Fixed(1, trigger=50), _Drawn(2)).propose(_batch([50], [51]))
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (4, VOCAB)
    assert draft.draft_probs[0].argmax() == 1
    assert draft.draft_probs[0].max() == 1


def test_output_is_the_targets_and_an_oracle_serves_what_lookup_leaves(
    start: Callable[..., LLM], plain: list[list[int]]
) -> None:
    """Wrong drafts for some requests, right ones for the others: the text stays, and each counts for its member."""
    oracle = OracleProposer(_runs(plain), vocab_size=VOCAB)
    composite = _composite(_Fixed(1, trigger=plain[0][3]), oracle)
    with start(**use_proposer(composite, 4)) as llm:
        assert _tokens(llm) == plain
        members = llm.stats().proposer["members"]
    assert members["b"]["num_accepted_tokens"] == members["b"]["num_draft_tokens"] > 0
    assert sum(member["num_draft_tokens"] for member in members.values()) == llm.stats().num_draft_tokens


def test_a_faulty_member_is_contained(
    start: Callable[..., LLM], plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    oracle = OracleProposer(_runs(plain), vocab_size=VOCAB)
    with start(**use_proposer(_composite(RaisingProposer(WrongProposer(1)), oracle), 4)) as llm:
        assert _tokens(llm) == plain
        stats = llm.stats()
    assert stats.acceptance_rate == 1
    assert stats.num_proposer_faults == 0
    assert not stats.speculation_disabled
    assert not stats.proposer["members"]["a"]["is_on"]
    assert "a is switched off after 3 faults in a row; the other members go on" in caplog.text


def test_by_name_with_a_choice_for_each_request(start: Callable[..., LLM], plain: list[list[int]]) -> None:
    pytest.importorskip("specdec_ngram")
    speculative = {
        "method": "composite",
        "proposers": [
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 4},
            {"method": "ngram", "prompt_lookup_max": 1, "num_speculative_tokens": 2},
        ],
        "speculation": "always",
    }
    with start(speculative_config=speculative) as llm:
        choices = [None, {"method": "ngram#2"}, "off", {"method": "ngram", "num_speculative_tokens": 1}]
        assert _tokens(llm, speculation=choices) == plain
        assert set(llm.stats().proposer["members"]) == {"ngram", "ngram#2"}
        with pytest.raises(InvalidRequestError, match=r"'ngran' is not loaded .* Did you mean 'ngram'\? Loaded:"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, speculation={"method": "ngran"})


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [{"method": "ngram"}, {"method": "ngram", "prompt_lookup_max": 0}],
            r"speculative\.proposers\[1\]\.prompt_lookup_max = 0: must be an integer",
        ),
        (
            [{"method": "ngram", "prompt_lookup_maxx": 2}],
            r"unknown setting 'speculative\.proposers\[0\]\.prompt_lookup_maxx'. Did you mean 'prompt_lookup_max'\?",
        ),
        ([{"model": "x"}], r"speculative\.proposers\[0\]\.method = null: must be the name of an installed proposer"),
        ([], r"speculative\.proposers = \[\]: must be a list of tables"),
        ("ngram", r"speculative\.proposers = 'ngram': must be a list of tables"),
        (
            [{"method": "ngram", "num_speculative_tokens": 0}],
            r"speculative\.proposers\[0\]\.num_speculative_tokens = 0: must be an integer of at least 1",
        ),
    ],
)
def test_what_is_wrong_in_a_member_is_said_with_its_place(members: Any, message: str) -> None:
    pytest.importorskip("specdec_ngram")
    with pytest.raises(ConfigError, match=message):
        propose(CompositeConfig(proposers=members), engine_context(registry=Registry()))


def test_members_are_checked_before_the_model_is_looked_for(start: Callable[..., LLM]) -> None:
    pytest.importorskip("specdec_ngram")
    wrong = {"method": "composite", "proposers": [{"method": "ngram", "prompt_lookup_max": 0}]}
    with pytest.raises(ConfigError, match=r"speculative\.proposers\[0\]\.prompt_lookup_max = 0"):
        LLM("/there/is/no/model", speculative_config=wrong)
    unknown = {"method": "composite", "proposers": [{"method": "ngrm"}]}
    with pytest.raises(PluginNotFoundError, match="ngrm"):
        LLM("/there/is/no/model", speculative_config=unknown)


def test_memory_names_the_member(tmp_path: Path) -> None:
    class Heavy(_Fixed):
        def memory(self) -> dict[str, int]:
            return {"index": 7}

    assert _composite(_Fixed(1), Heavy(2)).memory() == {"b/index": 7}
