"""Structured output (known bugs, class E): I6, and equality with constrained plain decoding, whoever drafts.

The tiny model has one token per character, so that texts and tokens are easily compared, and prefers nothing that the
grammars ask for.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from specdec import AsyncLLM, RequestOutput, SamplingParams
from specdec.drafting import Proposer
from specdec.errors import InvalidRequestError
from specdec.grammar import StructuredOutputsParams
from specdec.outputs import FORCED
from specdec.testing import OracleProposer, RandomProposer, WrongProposer
from specdec.testing.grammars import ChoiceBackend
from specdec.testing.oracles import ChainProposer
from specdec.types import Draft, DraftOutcome, ProposalInput, ProposerCapabilities
from tests.invariants.kit import PROMPTS, VOCAB, Baseline, Start, reasons, tokens

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["yes", "no", "yesterday"]},
    "regex": {"regex": "[a-c]{3,9}-[0-9]{2}"},
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "ebnf": {"grammar": 'root ::= "(" (root | "x" | "long text") ")"'},
}
PROPOSERS = ("oracle", "oracle_0", "oracle_2", "wrong", "random", "tree", "end")


def params_for(index: int, **rest: Any) -> SamplingParams:
    """Every fifth request is free."""
    kinds = [*GRAMMARS, None]
    kind = kinds[index % len(kinds)]
    constraint = {} if kind is None else {"structured_outputs": GRAMMARS[kind]}
    return SamplingParams(**{"temperature": 0, "max_tokens": 30} | constraint | rest)


def mixed(**rest: Any) -> list[SamplingParams]:
    return [params_for(i, **rest) for i in range(len(PROMPTS))]


def seeded() -> list[SamplingParams]:
    return [params_for(i, temperature=1.0, seed=i) for i in range(len(PROMPTS))]


def proposer_for(name: str, plain: list[RequestOutput], prompts: list[list[int]]) -> Proposer:
    runs = [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, plain, strict=True)]
    if name.startswith("oracle"):
        right = int(name[7:]) if name[7:] else None
        return OracleProposer(runs, vocab_size=VOCAB, right=right)
    if name == "end":
        return WrongProposer(1)  # the end token, allowed at times
    return WrongProposer(2) if name == "wrong" else RandomProposer(VOCAB, trees=name == "tree")


def check_text(kind: str | None, text: str, finish_reason: str | None) -> None:
    """I6, independently of the backend: complete at 'stop', and at 'length' at least not wrong so far."""
    if kind is None:
        return
    assert finish_reason in ("stop", "length"), finish_reason
    if finish_reason == "length":
        assert kind == "ebnf", f"{kind} always fits: {text!r}"
        assert re.fullmatch(r"\(*|\(+(x|[long text]+)\)*", text), text
    elif kind == "choice":
        assert text in GRAMMARS["choice"]["choice"]
    elif kind == "regex":
        assert re.fullmatch(GRAMMARS["regex"]["regex"], text)
    elif kind == "ebnf":
        assert re.fullmatch(r"\(+(x|long text)\)+", text)
        assert text.count("(") == text.count(")")
    else:
        value = json.loads(text)
        assert set(value) == {"name", "n"}
        assert isinstance(value["name"], str)
        assert 0 <= value["n"] <= 99


def check_all(outputs: list[RequestOutput]) -> None:
    kinds = [*GRAMMARS, None]
    for i, output in enumerate(outputs):
        for choice in output.outputs:
            check_text(kinds[i % len(kinds)], choice.text, choice.finish_reason)


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_equals_constrained_plain_decoding(start: Start, baseline: Baseline, name: str) -> None:
    """A batch of four grammars and free requests; chains and trees that are right, wrong, random."""
    plain = baseline(PROMPTS, mixed())
    check_all(plain)
    engine = start(proposer_for(name, plain, PROMPTS))
    outputs = engine.generate(PROMPTS, mixed(), use_tqdm=False)
    assert tokens(outputs) == tokens(plain)
    assert reasons(outputs) == reasons(plain)
    if name == "oracle":
        stats = engine.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["oracle_2", "random", "tree"])
def test_sampling_equals_constrained_plain_decoding(start: Start, baseline: Baseline, name: str) -> None:
    plain = baseline(PROMPTS, seeded())
    check_all(plain)
    engine = start(proposer_for(name, plain, PROMPTS))
    outputs = engine.generate(PROMPTS, seeded(), use_tqdm=False)
    assert tokens(outputs) == tokens(plain)
    assert reasons(outputs) == reasons(plain)


def test_ngram(start: Start, baseline: Baseline) -> None:
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    assert tokens(engine.generate(PROMPTS, mixed(), use_tqdm=False)) == tokens(baseline(PROMPTS, mixed()))
    assert engine.stats().num_grammar_cut_tokens > 0


@pytest.mark.parametrize("name", ["wrong", "random"])
def test_illegal_drafts_in_parallel(start: Start, name: str) -> None:
    """Known bug 35: eight JSON requests at temperature 1 whose drafts are prose."""
    engine = start(proposer_for(name, [], []))
    params = [SamplingParams(max_tokens=60, seed=i, structured_outputs=GRAMMARS["json"]) for i in range(8)]
    for output in engine.generate(PROMPTS, params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        check_text("json", output.outputs[0].text, "stop")
    assert engine.stats().num_grammar_cut_tokens > 0
    free = engine.generate([5], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(free[0].outputs[0].token_ids) == 3, "I11"


@pytest.mark.parametrize("ends", [1, 2, 3, 4, 5])
def test_the_grammar_ends_inside_a_draft(start: Start, baseline: Baseline, ends: int) -> None:
    """Known bug 37: drafts go on past the end of 'yes'."""
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["yes", "no"]})
    plain = baseline(PROMPTS[:1], params)[0].outputs[0]
    assert plain.text in ("yes", "no")
    assert plain.finish_reason == "stop"
    run = [*PROMPTS[0], *plain.token_ids, *[40 + ends] * 5]
    engine = start(OracleProposer([run], vocab_size=VOCAB), k=ends)
    output = engine.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.text, output.finish_reason) == (plain.token_ids, plain.text, "stop")


@pytest.mark.parametrize("name", ["oracle_2", "random"])
def test_preemption(start: Start, baseline: Baseline, name: str) -> None:
    """Known bug 38: a pool for few of the requests; states stay at their committed tokens."""
    long = {"regex": "[a-z ]{50,60}"}
    params = [SamplingParams(temperature=0, max_tokens=70, structured_outputs=long) for _ in range(6)]
    plain = baseline(PROMPTS[1:7], params)
    per_block = 2 * 2 * 2 * 16 * 4 * 8
    engine = start(
        proposer_for(name, plain, PROMPTS[1:7]), block_size=8, kv_cache_memory=24 * per_block, max_model_len=160
    )
    outputs = engine.generate(PROMPTS[1:7], params, use_tqdm=False)
    assert tokens(outputs) == tokens(plain)
    assert all(50 <= len(output.outputs[0].text) <= 60 for output in outputs)
    assert engine.stats().num_preemptions > 0


class Lawful(Proposer):
    """Draws draft tokens from a law of its own and tells it, as model-based proposers do."""

    capabilities = ProposerCapabilities(draft_probs=True)

    def __init__(self) -> None:
        self._rng = torch.Generator().manual_seed(0)

    def propose(self, batch: ProposalInput) -> Draft:
        counts = torch.from_numpy(batch.max_draft_tokens)
        probs = torch.rand(int(counts.sum()), VOCAB, generator=self._rng).softmax(dim=-1)
        tokens = torch.multinomial(probs, 1, generator=self._rng)[:, 0]
        return Draft(token_ids=tokens, num_draft_tokens=counts, draft_probs=probs)


def test_drafts_with_probabilities(start: Start) -> None:
    """Constrained requests and free ones side by side under rejection sampling, which takes laws for the free ones."""
    engine = start(Lawful(), verifier="rejection")
    for _ in range(2):
        outputs = engine.generate(PROMPTS, seeded(), use_tqdm=False)
        check_all(outputs)
    stats = engine.stats()
    assert stats.num_proposer_faults == 0
    assert stats.num_grammar_cut_tokens > 0
    assert stats.num_draft_tokens > 0


def test_several_choices_of_one_request(start: Start) -> None:
    engine = start(RandomProposer(VOCAB, trees=True))
    params = SamplingParams(n=6, max_tokens=40, seed=3, structured_outputs=GRAMMARS["regex"])
    choices = engine.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs
    assert len({choice.text for choice in choices}) > 1
    for choice in choices:
        check_text("regex", choice.text, choice.finish_reason)


def test_min_tokens_and_ignore_eos(start: Start) -> None:
    """min_tokens holds as long as the grammar can go on; with ignore_eos the output ends where nothing else can
    follow."""
    engine = start(RandomProposer(VOCAB))
    digits = {"regex": "[0-9]{1,9}"}

    def run(**options: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=20, **options)
        return engine.generate(PROMPTS[2], params, use_tqdm=False)[0].outputs[0]

    assert len(run(structured_outputs=digits, min_tokens=5).text) >= 5
    too_short = run(structured_outputs={"choice": ["yes", "no"]}, min_tokens=15)
    assert (too_short.text in ("yes", "no"), too_short.finish_reason) == (True, "stop")
    endless = run(structured_outputs=digits, ignore_eos=True)
    assert (len(endless.text), endless.finish_reason) == (9, "stop")


def test_stop_strings_and_limits_cut_as_ever(start: Start, baseline: Baseline) -> None:
    stops = SamplingParams(temperature=0, structured_outputs=GRAMMARS["json"], stop=['e"'], max_tokens=30)
    short = SamplingParams(temperature=0, structured_outputs=GRAMMARS["json"], max_tokens=4)
    plain = baseline(PROMPTS[:2], [stops, short])
    assert plain[0].outputs[0].text == '{"nam'
    assert reasons(plain) == [("stop", 'e"'), ("length", None)]
    engine = start(OracleProposer([], vocab_size=VOCAB))
    found = engine.generate(PROMPTS[:2], [stops, short], use_tqdm=False)
    assert tokens(found) == tokens(plain)
    assert reasons(found) == reasons(plain)


class Teller(ChainProposer):
    """Right for one token, and asks what became of its drafts."""

    def __init__(self, run: list[int]) -> None:
        self._run, self.told = run, [0, 0]

    def draft_for(self, request_id: str, token_ids: Any, max_draft_tokens: int) -> list[int]:
        return self._run[len(token_ids) : len(token_ids) + 1]

    def record(self, outcome: DraftOutcome) -> None:
        self.told[0] += int(outcome.num_draft_tokens.sum())
        self.told[1] += int(outcome.num_accepted_tokens.sum())


def test_forced_tokens_are_not_the_proposers(start: Start, baseline: Baseline) -> None:
    """They follow its own in one draft, and count neither for it nor against it."""
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"choice": ["a long text without a fork"]})
    plain = baseline(PROMPTS[3:4], params)
    teller = Teller([*PROMPTS[3], *plain[0].outputs[0].token_ids])
    engine = start(teller, k=5)
    found = engine.generate(PROMPTS[3:4], params, use_tqdm=False)
    assert tokens(found) == tokens(plain)
    stats = engine.stats()
    assert stats.num_grammar_accepted_tokens > 2 * stats.num_accepted_tokens > 0
    assert stats.num_draft_tokens_per_pos == stats.num_accepted_tokens_per_pos == (stats.num_drafts,)
    assert teller.told == [stats.num_draft_tokens, stats.num_accepted_tokens]
    assert stats.num_generated_tokens == len(plain[0].outputs[0].token_ids)
    drafted = stats.num_accepted_tokens + stats.num_grammar_accepted_tokens
    assert stats.num_generated_tokens == drafted + stats.num_steps - 1, (
        "each step has one more, but the last, which ends"
    )


class Silent(ChainProposer):
    def draft_for(self, request_id: str, token_ids: Any, max_draft_tokens: int) -> list[int]:
        return []


def test_jump_forward(start: Start, baseline: Baseline) -> None:
    """Where one token is left the engine drafts it, also when the proposer has nothing to say; all are accepted."""
    text = "exactly this text here"
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, structured_outputs={"choice": [text, "or that"]})
    plain = baseline(PROMPTS[3:4], params)
    engine = start(Silent(), k=6)
    found = engine.generate(PROMPTS[3:4], params, use_tqdm=False)
    assert tokens(found) == tokens(plain)
    stats, length = engine.stats(), len(plain[0].outputs[0].token_ids)
    assert stats.num_grammar_forced_tokens == stats.num_grammar_accepted_tokens > 0
    assert stats.num_drafts == stats.num_draft_tokens == stats.num_accepted_tokens == 0, "none of them the proposer's"
    told, origins = found[0].spec_stats, found[0].outputs[0].token_origins
    assert told.num_grammar_accepted_tokens == origins.count(FORCED) == stats.num_grammar_accepted_tokens
    assert (told.num_draft_tokens, told.mean_acceptance_length, max(origins)) == (0, 1.0, -1)
    assert stats.num_steps <= 1 + -(-(length - 1) // 7)
    alone = start()
    assert tokens(alone.generate(PROMPTS[3:4], params, use_tqdm=False)) == tokens(plain)
    assert alone.stats().num_grammar_forced_tokens == 0


def test_time_is_told(start: Start) -> None:
    engine = start(RandomProposer(VOCAB))
    engine.generate(PROMPTS[0], SamplingParams(), use_tqdm=False)
    assert engine.stats().grammar_seconds == 0
    engine.generate(PROMPTS[0], SamplingParams(structured_outputs=GRAMMARS["json"]), use_tqdm=False)
    stats = engine.stats()
    assert 0 < stats.grammar_seconds < stats.step_seconds


# --- what is wrong is said ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "objekt"}}, r'structured_outputs\.json .*cannot be used: Unsupported type "objekt"'),
        ({"json": {"not": {}}}, r"structured_outputs\.json .*does not enforce \$\.not"),
        ({"regex": "(ab"}, r"structured_outputs\.regex \(ab cannot be used: .*parenthesis is not closed"),
        ({"grammar": "root ::= foo"}, r'structured_outputs\.grammar .*Rule "foo" is not defined'),
    ],
)
def test_malformed_grammars(start: Start, constraint: dict[str, Any], message: str) -> None:
    engine = start()
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(PROMPTS[0], SamplingParams(structured_outputs=constraint), use_tqdm=False)
    assert engine.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)


def test_without_a_backend(start: Start) -> None:
    engine = start(plugins={"block": ["xgrammar"]})
    assert engine.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="none is installed: pip install specdec-grammar-xgrammar"):
        engine.generate(PROMPTS[0], SamplingParams(structured_outputs=GRAMMARS["json"]), use_tqdm=False)


# --- other backends, and faults -------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution ``toy 2.1`` with a grammar backend and logits processors of its own."""
    info = tmp_path / "toy-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy\nVersion: 2.1\nRequires-Dist: specdec-core>=0.1,<0.2\n"
    )
    (info / "entry_points.txt").write_text(
        "[specdec.grammars]\ntoygrammar = toyplugin\n[specdec.logits_processors]\ntoyprocessor = toyplugin\n"
    )
    code = """
        from specdec.errors import InvalidRequestError
        from specdec.hookspecs import hookimpl
        from specdec.sampling.processor import LogitsProcessor
        from specdec.testing.grammars import ChoiceBackend

        class Raising(LogitsProcessor):
            def check(self, params):
                if params.extra_args.get("toy") == "bad":
                    raise InvalidRequestError("extra_args.toy is bad")

            def applies(self, params):
                return "toy" in params.extra_args

            def process(self, logits, rows):
                if (rows.num_output_tokens >= 3).any():
                    raise RuntimeError("on purpose")

        @hookimpl
        def grammar(engine):
            info = engine.target_info
            return ChoiceBackend(engine.tokenizer, info.vocab_size, info.eos_token_ids)

        @hookimpl
        def logits_processor():
            return Raising()
    """
    (tmp_path / "toyplugin.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("toyplugin", None)


@pytest.mark.usefixtures("toy")
def test_another_backend(start: Start, baseline: Baseline) -> None:
    """A backend that shares no code with XGrammar gives the same outputs."""
    params = SamplingParams(temperature=0, structured_outputs=GRAMMARS["choice"])
    plain = baseline(PROMPTS, params)
    engine = start(RandomProposer(VOCAB, trees=True), grammar_backend="toygrammar")
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == tokens(plain)
    regex = SamplingParams(structured_outputs=GRAMMARS["regex"])
    with pytest.raises(InvalidRequestError, match="regex is not known to the grammar backend 'toygrammar' of toy 2.1"):
        engine.generate(PROMPTS[0], regex, use_tqdm=False)
    both = start()
    with pytest.raises(InvalidRequestError, match="several grammar backends are installed: toygrammar, xgrammar"):
        both.generate(PROMPTS[0], params, use_tqdm=False)


@pytest.mark.usefixtures("toy")
def test_a_raising_processor_fails_its_requests_alone(start: Start, baseline: Baseline) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    touched = SamplingParams(temperature=0, max_tokens=12, extra_args={"toy": 1})
    engine = start(RandomProposer(VOCAB), logits_processors=["toyprocessor"])
    outputs = engine.generate(PROMPTS[:4], [free, touched, free, free], use_tqdm=False)
    assert reasons(outputs)[1][0] == "error"
    message = outputs[1].outputs[0].error or ""
    assert "logits processor 'toyprocessor' of toy 2.1 raised RuntimeError in process(): on purpose" in message
    others = [0, 2, 3]
    plain = baseline([PROMPTS[i] for i in others], free)
    assert [tokens(outputs)[i] for i in others] == tokens(plain)
    with pytest.raises(InvalidRequestError, match="extra_args.toy is bad"):
        engine.generate(PROMPTS[0], SamplingParams(extra_args={"toy": "bad"}), use_tqdm=False)


def test_arguments_for_no_processor(start: Start) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args has toy, but this engine has no logits processors"):
        start().generate(PROMPTS[0], SamplingParams(extra_args={"toy": 1}), use_tqdm=False)


@pytest.mark.usefixtures("toy")
def test_a_broken_grammar_fails_its_request_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.testing.grammars import RuleMatcher

    original = RuleMatcher.fill_bitmask

    def broken(self: RuleMatcher, bitmask: Any, row: int) -> None:
        if len(self._tokens) >= 1:
            raise RuntimeError("on purpose")
        original(self, bitmask, row)

    monkeypatch.setattr(RuleMatcher, "fill_bitmask", broken)
    engine = start(RandomProposer(VOCAB), grammar_backend="toygrammar")
    params = [SamplingParams(max_tokens=5), SamplingParams(structured_outputs=GRAMMARS["choice"])]
    outputs = engine.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [reason for reason, _ in reasons(outputs)] == ["length", "error"]
    assert "its grammar raised RuntimeError: on purpose" in (outputs[1].outputs[0].error or "")


@pytest.mark.usefixtures("toy")
def test_a_slow_grammar_holds_up_nobody(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled before its request reaches the engine's thread; the second request with it finds it."""
    original = ChoiceBackend.compile
    compiled = []

    def slow(self: ChoiceBackend, spec: Any) -> Any:
        compiled.append(spec)
        time.sleep(0.4)
        return original(self, spec)

    monkeypatch.setattr(ChoiceBackend, "compile", slow)

    async def run() -> tuple[float, int]:
        settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "4MiB", "stat_loggers": ()}
        async with AsyncLLM(model, grammar_backend="toygrammar", **settings) as engine:
            gaps, last = [], time.monotonic()

            async def watched() -> None:
                nonlocal last
                async for _ in engine.generate(
                    PROMPTS[0], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
                ):
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

            async def constrained() -> str:
                params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
                return [o async for o in engine.generate(PROMPTS[1], params)][-1].outputs[0].text

            results = await asyncio.gather(watched(), constrained(), constrained())
            assert set(results[1:]) <= {"yes", "no"}
            return max(gaps[1:]), len(gaps)

    longest, _ = asyncio.run(run())
    assert len(compiled) == 1
    assert longest < 0.4
