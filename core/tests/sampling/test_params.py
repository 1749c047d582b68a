"""Defaults and every refusal, with the option and the value in the message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.errors import InvalidRequestError
from specdec.sampling.params import SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    got = {
        name: getattr(params, name) for name in ("n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    }
    assert got == {"n": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "max_tokens": 16}
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.detokenize, params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True, True)
    assert params.logprobs is None
    assert params.allowed_token_ids is None


BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "at least 1"),
    ("n", True, "at least 1"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "hot", "finite"),
    ("top_k", -2, "0 or -1 to keep all"),
    ("top_k", 1.5, "integer"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.1, "above 0 and at most 1"),
    ("top_p", float("nan"), "above 0 and at most 1"),
    ("min_p", -0.1, "at least 0 and at most 1"),
    ("min_p", 1.5, "at least 0 and at most 1"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", -1, "above 0"),
    ("presence_penalty", 2.5, "at least -2 and at most 2"),
    ("frequency_penalty", -2.5, "at least -2 and at most 2"),
    ("frequency_penalty", float("nan"), "at least -2 and at most 2"),
    ("seed", 1.5, "64 bits"),
    ("seed", 2**64, "64 bits"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -3, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("logprobs", -2, "at least 0"),
    ("prompt_logprobs", "all", "at least 0"),
    ("stop", [""], "none of them empty"),
    ("stop", [3], "strings"),
    ("stop", 3, "strings"),
    ("bad_words", [""], "none of them empty"),
    ("stop_token_ids", [-1], "token ids"),
    ("stop_token_ids", ["x"], "token ids"),
    ("stop_token_ids", 5, "token ids"),
    ("allowed_token_ids", [-1], "token ids"),
    ("allowed_token_ids", [], "give an id"),
    ("logit_bias", [1], "mapping"),
    ("logit_bias", {"x": 1.0}, "token ids"),
    ("logit_bias", {-1: 1.0}, "token ids"),
    ("logit_bias", {3: float("nan")}, "finite"),
    ("bad_words_token_ids", [[]], "none of them empty"),
    ("bad_words_token_ids", 5, "token-id sequences"),
    ("n", 10**9, "at most"),
    # Beyond float32, in which logits are processed: these would be infinite or 0 there.
    ("temperature", 1e308, "finite"),
    ("temperature", 10**400, "finite"),
    ("repetition_penalty", 1e308, "finite"),
    ("repetition_penalty", 1e-300, "above 0"),
    ("logit_bias", {3: -1e308}, "finite"),
    ("logit_bias", {3: 10**400}, "finite"),
    ("logit_bias", {"\u00b2": 1.0}, "token ids"),
    ("stop", ["\ud800"], "Unicode"),
    ("bad_words", ["a\udcff"], "Unicode"),
    ("ignore_eos", "yes", "True or False"),
    ("detokenize", 1, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "right"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, right: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert right in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_tokens": 20, "max_tokens": 10}, ["min_tokens (20)", "max_tokens (10)"]),
        ({"stop": ["x"], "detokenize": False}, ["stop", "detokenize"]),
        ({"n": 2, "temperature": 0}, ["n is 2", "temperature"]),
        ({"n": 2, "temperature": 1e-6}, ["n is 2", "temperature"]),
    ],
)
def test_contradictions_name_both_options(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert all(word in str(caught.value) for word in words)


def test_accepted_forms() -> None:
    params = SamplingParams(
        stop="END",
        stop_token_ids=[5, 5, np.int64(7)],
        max_tokens=np.int32(9),
        logit_bias={"3": 1, 4: -0.5},
        seed=-1,
        top_k=-1,
        allowed_token_ids=(4, 4),
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (5, 7)
    assert params.max_tokens == 9
    assert params.logit_bias == {3: 1.0, 4: -0.5}
    assert params.seed is None
    assert params.allowed_token_ids == (4,)
    assert SamplingParams(max_tokens=None, min_tokens=100).max_tokens is None


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=2e-5).greedy


class OneTokenPerCharacter:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) % 50 for c in text]


class SpacedWords:
    """A word with a space before it is one token, as in byte-level vocabularies."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return {"cat": [1], " cat": [2], "dog": [3], " dog": [4, 3]}[text]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words_token_ids"])
def test_ids_outside_the_vocabulary(name: str) -> None:
    value: Any = {"logit_bias": {100: 1.0}, "bad_words_token_ids": [[3, 100]]}.get(name, [3, 100])
    with pytest.raises(InvalidRequestError, match=f"{name} has token ids outside the vocabulary: 100; .* 0 to 99"):
        SamplingParams(**{name: value}).check_against(vocab_size=100, max_model_len=64)


def test_more_than_the_model_has() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 64.*64 tokens \(max_model_len\)"):
        SamplingParams(min_tokens=64, max_tokens=None).check_against(vocab_size=100, max_model_len=64)
    with pytest.raises(InvalidRequestError, match="logprobs is 101; it must be at most the vocabulary's size, 100"):
        SamplingParams(logprobs=101).check_against(vocab_size=100, max_model_len=64)


@pytest.mark.parametrize("options", [{"stop": ["x"]}, {"bad_words": ["x"]}])
def test_text_options_need_a_tokenizer(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        SamplingParams(**options).check_against(vocab_size=100, max_model_len=64)


def test_bad_words_become_token_sequences() -> None:
    params = SamplingParams(bad_words=["cat", "dog"], bad_words_token_ids=[[9, 9]])
    checked = params.check_against(vocab_size=100, max_model_len=64, tokenizer=SpacedWords())
    # " dog" has another number of tokens than "dog": banning it would ban the space.
    assert checked.bad_words_token_ids == ((9, 9), (1,), (2,), (3,))
    again = checked.check_against(vocab_size=100, max_model_len=64, tokenizer=SpacedWords())
    assert again == checked


def test_checking_changes_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], max_tokens=5)
    assert params.check_against(vocab_size=100, max_model_len=64, tokenizer=OneTokenPerCharacter()) is params
