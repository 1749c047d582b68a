"""JSON-schema prompts with the demonstration model: what ends is valid, with and without speculation, and the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specdec import LLM, SamplingParams

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.model

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts" / "json_schema.jsonl"
CASES = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
SHORT = (1, 4, 5)
"""Cases that the model ends soon; others it may continue for ever, as small models do."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def start(**settings: Any) -> LLM:
    return LLM("demo:smollm2", dtype="float32", max_model_len=4096, stat_loggers=(), **settings)


@pytest.fixture(scope="module")
def ngram() -> Iterator[LLM]:
    with start(speculative_config=NGRAM, proposer_time_budget=0) as engine:
        yield engine


def answers(engine: LLM, cases: list[dict[str, Any]], max_tokens: int) -> list[tuple[str, str | None, list[int]]]:
    chats = [[{"role": "user", "content": case["turns"][0]}] for case in cases]
    params = [
        SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs={"json": case["schema"]})
        for case in cases
    ]
    choices = [output.outputs[0] for output in engine.chat(chats, params, use_tqdm=False)]
    return [(choice.text, choice.finish_reason, choice.token_ids) for choice in choices]


def check(case: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), case["schema"])


def test_a_few_prompts(ngram: LLM) -> None:
    cases = [CASES[i] for i in SHORT]
    found = answers(ngram, cases, 160)
    for case, (text, reason, _) in zip(cases, found, strict=True):
        assert reason == "stop"
        check(case, text)
    stats = ngram.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.grammar_seconds > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_prompts(ngram: LLM) -> None:
    """Every output that ends is valid, and plain decoding gives the same tokens."""
    found = answers(ngram, CASES, 400)
    ended = [(case, text) for case, (text, reason, _) in zip(CASES, found, strict=True) if reason == "stop"]
    assert len(ended) >= len(CASES) // 2
    for case, text in ended:
        check(case, text)
    with start() as plain:
        assert answers(plain, CASES, 400) == found
