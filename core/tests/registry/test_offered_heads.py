"""Heads that distributions bring along for a target they name."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from specdec.cli.diagnosis import installed_methods
from specdec.config import PluginsConfig, SpeculativeConfig, from_kwargs
from specdec.errors import ModelNotFoundError
from specdec.registry import Registry
from specdec.target.resolve import resolve_model

from .conftest import PROPOSER, Toys

HEADS = """
[[head]]
target = "owner/model"
method = "wizard"
folder = "heads/wizard"

[[head]]
target = "demo:big"
method = "wizard"
folder = "heads/wizard"
name = "demo:big-wizard"

[[head]]
target = "owner/model"
method = "witch"
folder = "heads/that-is-not-there"
"""

NEEDS_A_MODEL = (
    PROPOSER
    + """
from attrs import frozen


@frozen(kw_only=True)
class Options:
    model: str


@hookimpl
def config_class():
    return Options
"""
)


def _bring_heads(toys: Toys, table: str = HEADS) -> Path:
    """A distribution whose only plugin is a command, and its head's folder."""
    files = {
        "toy_heads/__init__.py": "",
        "toy_heads/plugin.py": "",
        "toy_heads/specdec_heads.toml": table,
        "toy_heads/heads/wizard/config.json": "{}",
    }
    place = toys.add("toy-heads", {"specdec.commands": {"heads": "toy_heads.plugin"}}, files=files)
    return place / "toy_heads" / "heads" / "wizard"


def test_heads_are_found_by_target_without_importing(toys: Toys) -> None:
    folder = _bring_heads(toys)
    assert Registry().heads_for("owner/model") == {"wizard": str(folder)}
    assert Registry().heads_for("demo:big") == {"wizard": "demo:big-wizard"}
    assert Registry().heads_for("other") == {}
    assert "toy_heads" not in sys.modules
    assert Registry(PluginsConfig(block=["toy-heads"])).heads_for("demo:big") == {}


def test_a_name_with_demo_is_a_model_name(toys: Toys) -> None:
    folder = _bring_heads(toys)
    assert resolve_model("demo:big-wizard").path == folder
    with pytest.raises(ModelNotFoundError, match=r"no demonstration model 'demo:x'; there are: .*, demo:big-wizard$"):
        resolve_model("demo:x")


def test_without_any_it_says_where_heads_come_from(toys: Toys) -> None:
    toys.proposer("toy-wizard", "wizard")
    with pytest.raises(ModelNotFoundError, match="Heads come with another package: pip install specdec-demo"):
        resolve_model("demo:smollm2-wizard")


@pytest.mark.parametrize("table", ["head = 3", "[[head]]\ntarget = 'x'\n", HEADS + "size = 3\n"])
def test_a_malformed_file_is_told_and_passed_over(toys: Toys, table: str, caplog: pytest.LogCaptureFixture) -> None:
    _bring_heads(toys, table)
    with caplog.at_level(logging.WARNING):
        Registry().heads_for("nothing")
    assert "specdec_heads.toml is malformed" in caplog.text


def test_doctor_tries_the_methods_that_have_a_head_for_the_model(toys: Toys) -> None:
    _bring_heads(toys)
    toys.proposer("toy-wizard", "wizard", NEEDS_A_MODEL)
    toys.proposer("toy-witch", "witch", NEEDS_A_MODEL)
    toys.proposer("toy-free", "free")
    usable, incomplete = installed_methods(from_kwargs("demo:big"), 3)
    expected = {"free": None, "wizard": "demo:big-wizard"}
    assert usable == [
        SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, speculation="always")
        for method, model in expected.items()
    ]
    assert list(incomplete) == ["witch"]
    _, incomplete = installed_methods(from_kwargs("other"), 3)
    assert list(incomplete) == ["witch", "wizard"]
