"""JSON-schema prompts with the demonstration model: what ends is valid, what is cut off is valid so far, and every
proposer gives the tokens of constrained plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from attrs import frozen

from specdec import LLM, SamplingParams
from specdec.grammar import GrammarBackend, StructuredOutputsParams
from specdec.testing.context import engine_context

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.model

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts" / "json_schema.jsonl"
CASES = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
SHORT = (1, 4, 5)
"""Cases that the model ends soon; others it may continue for ever, as small models do."""
MAX_TOKENS = 160
"""All answers that the model ends at all are shorter."""
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "eagle3 trees": {"model": "demo:smollm2-eagle3", "num_speculative_tokens": 12, "tree_top_k": 4, "tree_depth": 4},
}


@frozen
class Answer:
    text: str
    reason: str | None
    token_ids: list[int]


def answers(cases: list[dict[str, Any]], speculative: dict[str, Any] | None) -> tuple[list[Answer], LLM]:
    """The greedy answers, and the engine, closed, for its statistics and its tokenizer."""
    chats = [[{"role": "user", "content": case["turns"][0]}] for case in cases]
    params = [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs={"json": case["schema"]})
        for case in cases
    ]
    settings = {"speculative_config": speculative, "proposer_time_budget": 0, "stat_loggers": ()}
    with LLM("demo:smollm2", dtype="float32", max_model_len=2048, **settings) as engine:
        choices = [output.outputs[0] for output in engine.chat(chats, params, use_tqdm=False)]
        return [Answer(choice.text, choice.finish_reason, choice.token_ids) for choice in choices], engine


def check(case: dict[str, Any], answer: Answer, backend: GrammarBackend) -> None:
    """The grammar takes every token and has come to its end only where the answer has; JSON that ended fits."""
    matcher = backend.compile(StructuredOutputsParams(json=case["schema"]).spec()).matcher()
    refused = [place for place, token in enumerate(answer.token_ids) if not matcher.accept(token)]
    assert refused == []
    assert answer.reason == ("stop" if matcher.is_terminated() else "length")
    if answer.reason == "stop":
        jsonschema.validate(json.loads(answer.text), case["schema"])
    else:
        assert len(answer.token_ids) == MAX_TOKENS


def backend_for(engine: LLM) -> GrammarBackend:
    from specdec_grammar_xgrammar.backend import XGrammarBackend
    from specdec_grammar_xgrammar.config import XGrammarConfig

    tokenizer = engine.get_tokenizer()
    ends = (tokenizer.eos_token_id,)
    context = engine_context(vocab_size=len(tokenizer), eos_token_ids=ends, tokenizer=tokenizer)
    return XGrammarBackend(XGrammarConfig(), context)


def test_a_few_prompts() -> None:
    cases = [CASES[i] for i in SHORT]
    found, engine = answers(cases, PROPOSERS["ngram"])
    backend = backend_for(engine)
    for case, answer in zip(cases, found, strict=True):
        assert answer.reason == "stop"
        check(case, answer, backend)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.grammar_seconds > 0
    whole = found[0]
    for spoilt in (whole.token_ids[1:], whole.token_ids[:-1], [*whole.token_ids, whole.token_ids[-1]]):
        with pytest.raises(AssertionError):
            check(cases[0], Answer(whole.text, "stop", spoilt), backend)


@pytest.fixture(scope="module")
def plain() -> tuple[list[Answer], GrammarBackend]:
    """The answers without speculation to all prompts."""
    found, engine = answers(CASES, None)
    return found, backend_for(engine)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_prompts_without_speculation(plain: tuple[list[Answer], GrammarBackend]) -> None:
    found, backend = plain
    for case, answer in zip(CASES, found, strict=True):
        check(case, answer, backend)
    assert sum(answer.reason == "stop" for answer in found) >= len(CASES) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROPOSERS)
def test_all_prompts(plain: tuple[list[Answer], GrammarBackend], name: str) -> None:
    """Valid with every proposer, and in float32 the very tokens of plain decoding."""
    expected, backend = plain
    found, engine = answers(CASES, PROPOSERS[name])
    for case, answer in zip(CASES, found, strict=True):
        check(case, answer, backend)
    assert found == expected
    assert engine.stats().num_accepted_tokens > 0
