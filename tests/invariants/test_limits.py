"""I8, I11, I12: bad input is refused with a message that helps, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PluginNotFoundError,
)
from tests.invariants.kit import PROMPTS, Baseline, Start, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def params(**fields: Any) -> Callable[[], SamplingParams]:
    return lambda: SamplingParams(**fields)


@pytest.mark.parametrize(
    ("prompt", "make", "says"),
    [
        ([], params(), "empty"),
        ([1, 999], params(), "999"),
        ([-1], params(), "-1"),
        ([[1, 2], "text"], params(), "prompt"),
        ([1.5], params(), "integer"),
        ({"text": "a"}, params(), "text"),
        ([5] * 256, params(), "max_model_len 256"),
        ([5] * 300, params(), "255"),
        ([5], params(temperature=-1), "temperature"),
        ([5], params(temperature=float("nan")), "temperature"),
        ([5], params(top_p=0), "top_p"),
        ([5], params(max_tokens=0), "max_tokens"),
        ([5], params(min_tokens=9, max_tokens=8), "min_tokens"),
        ([5], params(allowed_token_ids=[4000]), "4000"),
        ([5], params(logit_bias={4000: 1.0}), "4000"),
        ([5], params(n=2, temperature=0), "n"),
        ([5], params(repetition_penalty=1e-300), "repetition_penalty"),
        ("half a character \udcff", params(), "Unicode"),
    ],
)
def test_bad_requests(
    start: Start, baseline: Baseline, prompt: Any, make: Callable[[], SamplingParams], says: str
) -> None:
    engine = start(speculative_config={"method": "ngram"})
    with pytest.raises(InvalidRequestError, match=says):
        engine.generate([PROMPTS[0], prompt], [GREEDY, make()], use_tqdm=False)
    assert tokens(engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS[:1], GREEDY))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"speculative_config": {"method": "ngramm"}}, PluginNotFoundError, "ngram"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, ConfigError, "1"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 1000}}, ConfigError, "1000"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_maxx": 3}}, ConfigError, "prompt_lookup_max"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, ConfigError, "method"),
        ({"attention_backend": "flesh"}, PluginNotFoundError, "flesh"),
        ({"verifier": "mach"}, PluginNotFoundError, "match"),
        ({"kv_cache_memory": 1024}, CapacityError, "kv_cache_memory"),
        ({"kv_cache_memory": "99999999GiB"}, CapacityError, "this machine's memory"),
        ({"model": "x" * 5000}, ModelNotFoundError, "cannot be read"),
        ({"model": "~nobody-of-this-name/model"}, ModelNotFoundError, "cannot be read"),
        ({"tokenizer": "~nobody-of-this-name/model"}, ModelNotFoundError, "tokenizer: .* cannot be read"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len"),
        ({"block_sise": 4}, ConfigError, "block_size"),
        ({"dtype": "float8"}, ConfigError, "float8"),
    ],
)
def test_bad_settings(model: str, settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LLM(**({"model": model, "max_model_len": 256, "stat_loggers": ()} | settings))


@pytest.mark.parametrize("length", [62, 63, 64, 65, 68])
def test_prompts_around_the_limit(start: Start, length: int) -> None:
    """Known bug 50: room for drafts is not room for the prompt."""
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_model_len=64)
    if length < 64:
        assert len(tokens(engine.generate([5] * length, GREEDY, use_tqdm=False))[0]) == 64 - length
    else:
        with pytest.raises(InvalidRequestError, match=str(length)):
            engine.generate([5] * length, GREEDY, use_tqdm=False)
    assert len(tokens(engine.generate([5], GREEDY, use_tqdm=False))[0]) == 8


def test_the_kv_cache_limits_the_model_length(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Without max_model_len the engine takes what the cache holds, and says so."""
    engine = start(max_model_len=None, kv_cache_memory="256KiB")
    assert engine.max_model_len < 2048
    assert "max_model_len" in caplog.text


def test_priority_needs_its_policy(start: Start) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        start().generate([[5]], GREEDY, use_tqdm=False, priority=[3])


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 10**30},
        {"top_p": 1e-320},
        {"temperature": 1e38},
        {"temperature": 1e38, "top_k": 3},
        {"temperature": 1.1e-5},
        {"repetition_penalty": 1e38},
        {"repetition_penalty": 1.2e-38},
        {"logit_bias": {5: 1e38}},
        {"logit_bias": dict.fromkeys(range(128), -1e38)},
        {"max_tokens": 10**40},
    ],
)
def test_the_engine_survives_extreme_values(start: Start, extreme: dict[str, Any]) -> None:
    engine = start(speculative_config={"method": "ngram"})
    params = SamplingParams(**({"temperature": 1.0, "seed": 1, "max_tokens": 5} | extreme))
    reasons = [output.outputs[0].finish_reason for output in engine.generate(PROMPTS[:2], params, use_tqdm=False)]
    assert set(reasons) <= {"stop", "length", "error"}
    assert engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("priority", [["a"], [1.5], 1.5])
def test_a_priority_is_an_integer(start: Start, priority: Any) -> None:
    engine = start(scheduling_policy="priority")
    with pytest.raises(InvalidRequestError, match="priority"):
        engine.generate([[5]], GREEDY, use_tqdm=False, priority=priority)


@pytest.mark.parametrize("messages", [5, None, "hello", ["hello"], [{"role": "user", "content": "\udcff"}]])
def test_bad_conversations(start: Start, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="chat"):
        start().chat(messages, GREEDY, use_tqdm=False)


def test_many_short_requests_leak_nothing(start: Start) -> None:
    """Known bug 43: pages of several sizes, ends of several kinds; the fixture counts the blocks."""
    for block_size in (1, 4, 16):
        engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, block_size=block_size)
        for stop in ([], [7], [*range(64)]):
            engine.generate(
                [[7, 8, 9, 7, 8, i % 100] for i in range(25)],
                SamplingParams(temperature=1.0, seed=1, max_tokens=6, stop_token_ids=stop),
                use_tqdm=False,
            )
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks


def test_more_prompts_than_may_wait(start: Start) -> None:
    engine = start(max_waiting_requests=2, max_num_seqs=2)
    assert len(engine.generate([[5, i] for i in range(20)], GREEDY, use_tqdm=False)) == 20


def test_a_closed_engine_says_so(model: str) -> None:
    engine = LLM(model, max_model_len=64, stat_loggers=())
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate([5], GREEDY, use_tqdm=False)


def test_statistics_without_traffic_are_finite(start: Start) -> None:
    """Known bug 74."""
    engine = start(speculative_config={"method": "ngram"})
    for _ in range(2):
        stats = engine.stats()
        assert stats.acceptance_rate == 0.0
        assert stats.mean_acceptance_length == 1.0
        engine.generate([5, 6, 8], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)


def test_multi_turn_prefix_hits(start: Start) -> None:
    """Known bug 44: a growing conversation finds all of its full blocks."""
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, block_size=4)
    history = [*range(20, 44)]
    for _ in range(4):
        output = engine.generate(history, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0]
        known = len(history)
        history = [*history, *output.outputs[0].token_ids, *range(50, 61)]
        again = engine.generate(history, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
        assert again.num_cached_tokens >= (known + 8) // 4 * 4
