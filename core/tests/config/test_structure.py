"""Building configuration classes, those of plugins included, from plain values."""

from typing import Any, Literal

import attrs
import pytest
from attrs.validators import ge, in_, instance_of

from specdec.config import structure
from specdec.config import validators as check
from specdec.errors import ConfigError


@attrs.frozen(kw_only=True)
class LookupConfig:
    """As a plugin would write it, with attrs' own validators."""

    prompt_lookup_max: int = attrs.field(default=4, validator=[instance_of(int), ge(1)])
    prompt_lookup_min: int = attrs.field(default=2, validator=[instance_of(int), ge(1)])
    mode: str = attrs.field(default="fast", validator=in_(["fast", "slow"]))
    weights: list[float] = attrs.field(factory=list)
    names: dict[str, int] = attrs.field(factory=dict)
    level: Literal[1, 2] = 1
    pair: tuple[int, int] = (1, 2)
    anything: Any = None
    depth: int = attrs.field(default=3, validator=check.integer(1, 9))

    def __attrs_post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min exceeds prompt_lookup_max")


def refusal(**values):
    with pytest.raises(ConfigError) as caught:
        structure(LookupConfig, values, "speculative")
    return caught.value


def test_good_values():
    config = structure(LookupConfig, {"prompt_lookup_max": 5, "weights": [1, 2.5], "names": {"a": 1}}, "speculative")
    assert config == LookupConfig(prompt_lookup_max=5, weights=[1.0, 2.5], names={"a": 1})
    assert structure(LookupConfig, {}) == LookupConfig()


def test_unknown_keys_get_the_section_and_the_closest_name():
    error = refusal(prompt_lookup_maxx=3)
    assert str(error) == "unknown setting 'speculative.prompt_lookup_maxx'. Did you mean 'prompt_lookup_max'?"
    assert error.path == "speculative.prompt_lookup_maxx"


@pytest.mark.parametrize("value", ["7", True, 1.0, None, [1]])
def test_nothing_is_coerced_to_int(value):
    assert refusal(prompt_lookup_max=value).path == "speculative.prompt_lookup_max"


def test_attrs_own_validators_keep_their_text():
    assert str(refusal(prompt_lookup_max=0)) == "speculative.prompt_lookup_max = 0: must be >= 1."
    assert str(refusal(mode="odd")) == "speculative.mode = 'odd': must be 'fast' or 'slow'."


def test_our_validators_get_the_section():
    assert str(refusal(depth=10)) == "speculative.depth = 10: must be an integer from 1 to 9."
    assert str(refusal(depth="x")) == "speculative.depth = 'x': must be an integer from 1 to 9."


def test_cross_field_rules_keep_their_text():
    assert "prompt_lookup_min exceeds prompt_lookup_max" in str(refusal(prompt_lookup_min=5, prompt_lookup_max=4))


def test_nested_values_are_located():
    assert str(refusal(weights=[1.0, "x"])).startswith("speculative.weights")
    assert str(refusal(weights="abc")) == "speculative.weights = 'abc': must be a list."
    assert str(refusal(names={"a": True})).startswith("speculative.names")
    assert str(refusal(names=[1])) == "speculative.names = [1]: must be a table."
    assert str(refusal(pair=[1, 2, 3])) == "speculative.pair = [1, 2, 3]: must be a list of 2."
    assert str(refusal(level=True)).startswith("speculative.level = true")


def test_origins_are_told():
    with pytest.raises(ConfigError, match=r"speculative.depth = 0 \(x.toml:3\): must be"):
        structure(LookupConfig, {"depth": 0}, "speculative", {"speculative.depth": "x.toml:3"})


def test_integers_of_numpy_are_integers():
    import numpy as np

    config = structure(LookupConfig, {"prompt_lookup_max": np.int64(5)})
    assert type(config.prompt_lookup_max) is int


def test_all_mistakes_are_reported_together():
    """Unknown keys, wrong types and refused values; several refused values too, which attrs meets one at a time."""
    error = refusal(prompt_lookup_mx=3, prompt_lookup_max=0, depth=10, mode="odd", weights="abc", pair=[1])
    assert [problem.path for problem in error.problems] == [
        "speculative.weights",
        "speculative.pair",
        "speculative.prompt_lookup_mx",
        "speculative.prompt_lookup_max",
        "speculative.mode",
        "speculative.depth",
    ]


def test_what_is_left_out_causes_no_further_complaint():
    """A rule about two values is silent when one of them was refused and its default took the place."""
    error = refusal(prompt_lookup_max="x", prompt_lookup_min=9)
    assert error.path == "speculative.prompt_lookup_max"
    assert not hasattr(error, "problems")
