"""Options of the method: vLLM's names and defaults, limits, and what refusals say."""

import pytest

from specdec.errors import ConfigError
from specdec.registry import Registry
from specdec_suffix.config import SuffixConfig


def test_defaults_are_those_of_vllm() -> None:
    config = Registry().plugin_config("proposer", "suffix", {})
    assert isinstance(config, SuffixConfig)
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_cached_requests == 10_000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 513),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_spec_factor", -0.5),
        ("suffix_decoding_min_token_prob", 1.5),
        ("suffix_max_cached_tokens", True),
        ("suffix_trees", 1),
        ("suffix_cache_path", ""),
    ],
)
def test_bad_values(name: str, value: object) -> None:
    """A refusal names the option and its value."""
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "suffix", {name: value})
    assert f"speculative.{name}" in str(caught.value)
    assert repr(value) in str(caught.value) or str(value).lower() in str(caught.value)


def test_unknown_option() -> None:
    with pytest.raises(ConfigError, match=r"speculative\.suffix_decoding_max_depth"):
        Registry().plugin_config("proposer", "suffix", {"suffix_decoding_max_depth": 3})
