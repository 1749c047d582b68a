"""Names that mean nothing, something else, or something that is not installed."""

from __future__ import annotations

import pytest

from specdec.errors import PluginKindError, PluginNotFoundError
from specdec.registry import Registry

from .conftest import Toys


def _refusal(kind: str, name: str) -> PluginNotFoundError:
    with pytest.raises(PluginNotFoundError) as caught:
        Registry().create(kind, name, "propose", config={}, engine=None)
    return caught.value


def test_a_typo_for_a_known_name_that_is_not_installed(toys: Toys) -> None:
    toys.proposer("toy-ngram", "ngram", version="0.3.1")
    toys.proposer("toy-draft", "draft_model", version="0.3.1")
    error = _refusal("proposer", "eagel")
    assert str(error) == (
        "No proposer named 'eagel'. Did you mean 'eagle' (not installed: pip install specdec-eagle)? "
        "Installed proposers: draft_model 0.3.1, ngram 0.3.1."
    )
    assert (error.suggestion, error.install) == ("eagle", "specdec-eagle")
    assert error.installed == ("draft_model", "ngram")


def test_a_typo_for_an_installed_name(toys: Toys) -> None:
    toys.proposer("toy-wizard", "wizard")
    error = _refusal("proposer", "wizzard")
    assert str(error) == "No proposer named 'wizzard'. Did you mean 'wizard'? Installed proposers: wizard 1.0."
    assert (error.suggestion, error.install) == ("wizard", None)


def test_a_known_name_that_is_not_installed(toys: Toys) -> None:
    toys.add("else", {"console_scripts": {"a": "b:c"}})
    assert str(_refusal("proposer", "ngram")) == (
        "No proposer named 'ngram' is installed: pip install specdec-ngram. Installed proposers: none."
    )


def test_a_name_like_nothing(toys: Toys) -> None:
    toys.proposer("toy-wizard", "wizard")
    assert str(_refusal("proposer", "qqqq")) == "No proposer named 'qqqq'. Installed proposers: wizard 1.0."


def test_broken_distributions_are_mentioned_since_they_may_hold_the_name(toys: Toys) -> None:
    """Known bug 94: the original cause, rather than 'unknown method'."""
    toys.add("toy-bad", "[specdec.proposers]\nwizard\n", version="0.2")
    error = _refusal("proposer", "wizard")
    assert "toy-bad 0.2 is installed but broken: its entry_points.txt cannot be parsed: line 2, 'wizard'" in str(error)


def test_a_head_is_not_a_proposer(toys: Toys) -> None:
    toys.add("toy-head", {"specdec.heads": {"wizard.llama": "toy_head.plugin"}})
    toys.proposer("toy-wizard", "wizard")
    with pytest.raises(PluginKindError) as caught:
        Registry().select("proposer", "wizard.llama")
    assert str(caught.value) == (
        "'wizard.llama' is a head, not a proposer: heads are used through a proposer (speculative.method), which picks "
        "the head that fits the target. Installed proposers: wizard 1.0."
    )
    assert caught.value.actual_kind == "head"


def test_the_kind_of_a_name_that_is_only_known_is_told_too(toys: Toys) -> None:
    toys.add("else", {"console_scripts": {"a": "b:c"}})
    with pytest.raises(PluginKindError, match="'eagle3' is a proposer, not a verifier: proposers are selected by"):
        Registry().select("verifier", "eagle3")
    with pytest.raises(PluginKindError, match="'sdpa' is an attention backend, not a proposer"):
        Registry().select("proposer", "sdpa")
