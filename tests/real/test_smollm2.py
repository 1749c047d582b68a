"""The demonstration model in float32: with any speculation the words are plain decoding's (known bugs, class A)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPT_SETS = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def start(dtype: str = "float32", **settings: Any) -> LLM:
    return LLM("demo:smollm2", dtype=dtype, max_model_len=2048, stat_loggers=(), **settings)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with start() as engine:
        yield engine


@pytest.fixture(scope="module")
def ngram() -> Iterator[LLM]:
    with start(speculative_config=NGRAM, proposer_time_budget=0) as engine:
        yield engine


def conversations(name: str, count: int) -> list[list[dict[str, str]]]:
    lines = (PROMPT_SETS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines[:count]]


def words(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str | None]]:
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


@pytest.mark.parametrize("name", ["code_edit", "mt_bench"])
def test_greedy_is_token_identical(plain: LLM, ngram: LLM, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=96)
    chats = conversations(name, 8)
    before = ngram.stats()
    assert words(ngram.chat(chats, params, use_tqdm=False)) == words(plain.chat(chats, params, use_tqdm=False))
    assert ngram.stats().num_accepted_tokens > before.num_accepted_tokens


def test_sampling_is_token_identical_for_the_same_seed(plain: LLM, ngram: LLM) -> None:
    chats = conversations("code_edit", 6)
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=64) for i in range(6)]
    assert words(ngram.chat(chats, params, use_tqdm=False)) == words(plain.chat(chats, params, use_tqdm=False))


def test_a_word_repeated(plain: LLM, ngram: LLM) -> None:
    """Known bug 1."""
    prompt = " ".join(["banana"] * 48)
    params = SamplingParams(temperature=0, max_tokens=32)
    assert words(ngram.generate(prompt, params, use_tqdm=False)) == words(
        plain.generate(prompt, params, use_tqdm=False)
    )


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0, "repetition_penalty": 1.3},
    ],
)
def test_penalties(plain: LLM, ngram: LLM, penalty: dict[str, float]) -> None:
    """Known bug 14."""
    params = SamplingParams(temperature=0, max_tokens=24, **penalty)  # type: ignore[arg-type]
    prompt = "hello hello hello"
    assert words(ngram.generate(prompt, params, use_tqdm=False)) == words(
        plain.generate(prompt, params, use_tqdm=False)
    )


@pytest.mark.parametrize("stop", ["\n", "the", " la la la", "."])
def test_stop_strings(plain: LLM, ngram: LLM, stop: str) -> None:
    """Known bugs 23 and 26."""
    params = SamplingParams(temperature=0, max_tokens=32, stop=[stop], logprobs=2)
    for prompt in ("la la la la la", "The rain in Spain falls mainly in the"):
        output = ngram.generate(prompt, params, use_tqdm=False)
        assert words(output) == words(plain.generate(prompt, params, use_tqdm=False))
        choice = output[0].outputs[0]
        assert len(choice.logprobs or []) == len(choice.token_ids)
        assert stop not in choice.text


def test_logprobs_are_the_targets(ngram: LLM, plain: LLM) -> None:
    """Known bug 29: not all zero, and the chosen token is the first alternative."""
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=3)
    chats = conversations("code_edit", 2)
    for output, expected in zip(
        ngram.chat(chats, params, use_tqdm=False), plain.chat(chats, params, use_tqdm=False), strict=True
    ):
        choice, other = output.outputs[0], expected.outputs[0]
        assert choice.logprobs is not None
        assert other.logprobs is not None
        values = [found[t].logprob for t, found in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert min(values) < -0.01
        assert values == pytest.approx(
            [found[t].logprob for t, found in zip(other.token_ids, other.logprobs, strict=True)], abs=1e-3
        )
        assert all(found[t].rank == 1 for t, found in zip(choice.token_ids, choice.logprobs, strict=True))


def test_half_precision_differs_only_at_near_ties() -> None:
    """Known bug 5, a negative control: where bfloat16 outputs part, the two best logits were close."""
    chats = conversations("mt_bench", 8)
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=2)
    with start("bfloat16") as plain, start("bfloat16", speculative_config=NGRAM) as ngram:
        for a, b in zip(
            plain.chat(chats, params, use_tqdm=False), ngram.chat(chats, params, use_tqdm=False), strict=True
        ):
            one, two = a.outputs[0], b.outputs[0]
            parted = [i for i, (x, y) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if x != y]
            if parted:
                assert one.logprobs is not None
                found = one.logprobs[parted[0]]
                assert two.token_ids[parted[0]] in found, "not even the second choice"
                gap = abs(found[one.token_ids[parted[0]]].logprob - found[two.token_ids[parted[0]]].logprob)
                assert gap < 0.3


def test_text_equals_one_shot_decoding(ngram: LLM) -> None:
    tokenizer = ngram.get_tokenizer()
    prompts = [
        "Write ten emojis: 😀 🎉 😀 🎉 😀 🎉",
        "日本語で書いてください。日本語で書いて",
        "Ünïcödé ünïcödé ünïcödé",
    ]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for output in ngram.generate(prompts, params, use_tqdm=False):
        whole = tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids], skip_special_tokens=True)
        assert whole.endswith(output.outputs[0].text)


def test_tokens_equal_transformers_generate(plain: LLM) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(plain._engine.context.target_info.path, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=48)
    for output in plain.chat(conversations("mt_bench", 3), params, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
