"""Values and faults in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.config import load
from specdec.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from specdec.sampling.params import SamplingParams
from specdec.target.resolve import resolve_model
from specdec.wording import cause_of, reason_of, shown


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
            SamplingParams(**options)
        assert not {"None", "False", "True", "("} & set(str(caught.value).replace(";", " ").split())


def test_the_place_of_a_fault_is_in_the_code_that_called_wrongly(tmp_path: Path) -> None:
    """Not in the library that noticed, not in specdec, which called the code."""
    code = "import json\n\ndef plugin():\n    return shown_as(json.loads('{'))\n"
    module: dict[str, Any] = {"__name__": "toy.plugin", "shown_as": shown}
    exec(compile(code, str(tmp_path / "plugin.py"), "exec"), module)
    with pytest.raises(ValueError, match="Expecting") as caught:
        module["plugin"]()
    assert cause_of(caught.value).endswith("(char 1) (toy.plugin, line 4)")


def test_a_fault_of_specdec_itself_has_a_place_too() -> None:
    error = RuntimeError("odd")
    try:
        _raise_in("specdec.runner.commit", error)
    except RuntimeError:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    assert cause_of(error) == "RuntimeError: odd (specdec.runner.commit, line 1)"


def _raise_in(module: str, error: Exception) -> None:
    exec("raise error", {"__name__": module, "error": error})


def test_what_is_raised_on_purpose_has_no_place() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=0)
    assert cause_of(caught.value) == f"InvalidRequestError: {caught.value}"
    assert cause_of(ValueError("odd")) == "ValueError: odd"
