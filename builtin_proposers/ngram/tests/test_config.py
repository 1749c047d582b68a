"""Options of the method: vLLM's defaults, limits, and what refusals say."""

import pytest

from specdec.errors import ConfigError
from specdec.registry import Registry
from specdec.wording import shown
from specdec_ngram.config import NgramConfig


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": 10, "prompt_lookup_max": 500}, (10, 500)),
    ],
)
def test_lengths(options: dict[str, int], lengths: tuple[int, int]) -> None:
    """One length alone stands for both; none means 5."""
    config = Registry().plugin_config("proposer", "ngram", options)
    assert isinstance(config, NgramConfig)
    assert (config.min_length, config.max_length) == lengths


@pytest.mark.parametrize("value", [0, -1, 1025, 2.0, "4", True])
@pytest.mark.parametrize("name", ["prompt_lookup_min", "prompt_lookup_max"])
def test_bad_length(name: str, value: object) -> None:
    """A refusal names the option, its value and the bounds."""
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "ngram", {name: value})
    message = str(caught.value)
    assert f"speculative.{name}" in message
    assert shown(value) in message
    assert "integer" in message


def test_contradiction() -> None:
    """Both values are named."""
    with pytest.raises(ConfigError, match=r"prompt_lookup_min is 6 and speculative\.prompt_lookup_max is 3"):
        Registry().plugin_config("proposer", "ngram", {"prompt_lookup_min": 6, "prompt_lookup_max": 3})


def test_unknown_option() -> None:
    """A misspelt option is an error with its path and the closest match."""
    with pytest.raises(ConfigError, match=r"speculative\.prompt_lookup_maxx"):
        Registry().plugin_config("proposer", "ngram", {"prompt_lookup_maxx": 3})
