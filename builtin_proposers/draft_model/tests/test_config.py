"""Options are checked, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.registry import Registry


def options(**values: Any) -> Any:
    return Registry().plugin_config("proposer", "draft_model", values)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"speculative\.model is not set\. It must be given: the drafter"):
        options()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"draft_sample_method": "lucky"}, ["draft_sample_method", "lucky", "greedy"]),
        ({"confidence_threshold": 1.5}, ["confidence_threshold", "1.5"]),
        ({"draft_dtype": "int8"}, ["draft_dtype", "int8", "bfloat16"]),
        ({"draft_num_threads": 0}, ["draft_num_threads", "0"]),
        ({"max_model_len": 1}, ["max_model_len", "1"]),
        ({"use_heterogenous_vocab": True}, ["use_heterogenous_vocab", "use_heterogeneous_vocab"]),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        options(model="x", **values)
    assert all(word in str(caught.value) for word in words), str(caught.value)
