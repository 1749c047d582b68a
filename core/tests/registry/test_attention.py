"""Choosing an attention backend."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from specdec.errors import PluginImportError, PluginNotFoundError, PluginUnsuitableError
from specdec.registry import Registry
from specdec.types import AttentionRequirements

from .conftest import Toys

BACKEND = """
from specdec.attention.interface import AttentionBackend
from specdec.hookspecs import hookimpl


class Toy(AttentionBackend):
    name = {name!r}
    priority = {priority}

    def supports(self, requirements):
        return {reasons}

    def plan(self, batch, cache): ...

    def attend(self, query, key, value, layer, plan, sinks=None): ...


@hookimpl
def attention_backend():
    return Toy()
"""


def _add(toys: Toys, name: str, priority: int = 0, reasons: str = "[]", code: str = BACKEND) -> None:
    code = code.format(name=name, priority=priority, reasons=reasons) if code is BACKEND else code
    points = {"specdec.attention_backends": {name: f"toy_{name}"}}
    toys.add(f"toy-{name}", points, files={f"toy_{name}.py": code})


def _pick(wanted: str = "auto", *, trees: bool = False) -> Any:
    requirements = AttentionRequirements(layers=(), dtype="float32", device="cpu", block_size=4, trees=trees)
    return Registry().attention_backends(requirements, None, wanted=wanted)  # type: ignore[arg-type]


def test_auto_takes_the_highest_priority_among_those_that_serve(toys: Toys) -> None:
    _add(toys, "low", 1)
    _add(toys, "high", 5)
    _add(toys, "unfit", 9, "['no soft cap']")
    assert _pick().name == "high"


def test_a_named_one_is_taken_whatever_its_priority(toys: Toys) -> None:
    _add(toys, "low", 1)
    _add(toys, "high", 5)
    assert _pick("low").name == "low"


def test_a_named_one_that_cannot_serve_is_refused_with_all_reasons(toys: Toys) -> None:
    _add(toys, "low")
    _add(toys, "unfit", 9, "['no soft cap', 'head_dim 48 is not a multiple of 64']")
    with pytest.raises(PluginUnsuitableError) as caught:
        _pick("unfit")
    assert str(caught.value) == (
        "The attention backend 'unfit' of toy-unfit 1.0 cannot serve this model: no soft cap; head_dim 48 is not a "
        'multiple of 64. With attention_backend = "auto" one that can is taken.'
    )
    assert caught.value.reasons == ("no soft cap", "head_dim 48 is not a multiple of 64")
    with pytest.raises(PluginUnsuitableError, match="cannot serve this model with draft trees: no soft cap"):
        _pick("unfit", trees=True)


def test_a_named_one_that_is_not_installed(toys: Toys) -> None:
    _add(toys, "low")
    with pytest.raises(PluginNotFoundError, match="pip install specdec-attention-triton"):
        _pick("triton")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('built for another libc')", "RuntimeError: .*built for another libc"),
        ("from specdec.hookspecs import hookimpl\n@hookimpl\ndef attention_backend(): 1 / 0", "ZeroDivisionError: "),
        (BACKEND.replace("return {reasons}", "raise KeyError('x')").format(name="bad", priority=1), "KeyError: "),
    ],
    ids=["at import", "in the hook", "in supports"],
)
def test_one_that_fails_is_passed_over_and_logged(
    toys: Toys, caplog: pytest.LogCaptureFixture, code: str, told: str
) -> None:
    """Known bug 94: not in silence, and fatal when it was asked for by name."""
    _add(toys, "bad", code=code)
    _add(toys, "good")
    with caplog.at_level(logging.WARNING):
        assert _pick().name == "good"
    (message,) = caplog.messages
    assert message.startswith("Attention backend 'bad' is passed over: ")
    assert told.partition(":")[0] in message
    with pytest.raises(Exception, match=r"'bad' of toy-bad 1\.0"):
        _pick("bad")


def test_a_blocked_one_is_left_out_without_a_warning(
    toys: Toys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_PLUGINS_BLOCK", "best")
    _add(toys, "best", 9)
    with caplog.at_level(logging.WARNING), pytest.raises(PluginUnsuitableError, match="named in SPECDEC_PLUGINS_BLOCK"):
        _pick()
    _add(toys, "good")
    assert _pick().name == "good"
    assert not caplog.records


def test_none_that_serves_is_an_error_with_the_reasons_of_each(toys: Toys) -> None:
    _add(toys, "a", reasons="['no trees', 'no sinks']")
    _add(toys, "b", code="raise ImportError('gone')")
    with pytest.raises(PluginUnsuitableError) as caught:
        _pick()
    text = str(caught.value)
    assert text.startswith(
        "No installed attention backend can serve this model: a: no trees, no sinks; b: The attention"
    )
    assert "ImportError: gone" in text


def test_a_named_one_that_fails_to_import_keeps_its_cause(toys: Toys) -> None:
    _add(toys, "bad", code="raise ImportError('gone')")
    with pytest.raises(PluginImportError) as caught:
        _pick("bad")
    assert isinstance(caught.value.__cause__, ImportError)
