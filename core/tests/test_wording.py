"""Values and faults in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.config import load
from specdec.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from specdec.sampling.params import SamplingParams
from specdec.target.resolve import resolve_model
from specdec.wording import reason_of, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (("a", 2), '["a", 2]'),
        ({"k": (1, None)}, '{"k": [1, null]}'),
        ("it's", '"it\'s"'),
        ("a", "'a'"),
        (2.0, "2.0"),
        (Path("x"), '"x"'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
    ],
)
def test_values_are_written_as_in_files(value: Any, text: str) -> None:
    assert shown(value) == text


def test_long_values_lose_their_middle() -> None:
    assert shown("a" * 100 + "b") == f"'{'a' * 37}...{'a' * 36}b'"


def test_errors_of_the_system_have_no_numbers(tmp_path: Path) -> None:
    assert reason_of(FileNotFoundError(2, "No such file or directory", "x")) == "no such file or directory"
    assert reason_of(ValueError("one\ntwo")) == "one"
    assert reason_of(ValueError()) == "ValueError"
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: no such file or directory$"):
        load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="latin.toml cannot be read: it is not UTF-8 text"):
        load(tmp_path / "latin.toml")
    with pytest.raises(ModelNotFoundError, match="cannot be read: file name too long$"):
        resolve_model("a" * 300)


def test_no_python_in_refusals_of_requests() -> None:
    """They are read by people who wrote JSON, TOML or a command line."""
    for options in ({"max_tokens": 0}, {"seed": 2**64}, {"logprobs": -2}, {"stop": ("a",), "detokenize": False}):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**options)  # type: ignore[arg-type]
        assert not {"None", "False", "True", "("} & set(str(caught.value).replace(";", " ").split())
