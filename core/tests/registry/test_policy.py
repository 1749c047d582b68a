"""Statuses, and the settings that choose among plugins."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from specdec.config.schema import PluginsConfig
from specdec.errors import PluginBlockedError, PluginConflictError, PluginVersionError
from specdec.registry import Registry

from .conftest import Toys, statuses


def _registry(environ: dict[str, str] | None = None, **settings: Any) -> Registry:
    return Registry(PluginsConfig(**settings), environ=environ or {})


def test_every_status(toys: Toys) -> None:
    toys.proposer("toy-good", "good")
    toys.proposer("toy-lacking", "lacking", requires=("no-such-distribution>=2", "numpy<1"))
    toys.proposer("toy-future", "future", requires=("specdec-core>=99",))
    toys.proposer("toy-first", "same")
    toys.add("toy-second", {"specdec.proposers": {"same": "toy_second.plugin"}})
    toys.proposer("toy-shut", "shut")
    toys.add("toy-bad", "[specdec.proposers]\nbad\n")
    registry = _registry(block=("shut",))
    assert statuses(registry) == {
        "good": "ok",
        "lacking": "missing dependency",
        "future": "wrong core version",
        "same": "conflict",
        "shut": "blocked",
        "toy-bad": "broken",
    }
    details = {entry.name: entry.detail for entry in registry.entries()}
    assert "no-such-distribution is not installed; requires numpy <1; " in details["lacking"]
    assert details["shut"] == "named in plugins.block"


def test_requirements_of_extras_and_other_platforms_do_not_count(toys: Toys) -> None:
    toys.proposer("toy-good", "good", requires=('nope; extra == "fast"', 'nope2; sys_platform == "win32"'))
    assert statuses(Registry()) == {"good": "ok"}


def test_an_extra_that_the_entry_point_asks_for_counts(toys: Toys) -> None:
    toys.add(
        "toy-fast", {"specdec.proposers": {"fast": "toy_fast.plugin [speed]"}}, requires=('nope; extra == "speed"',)
    )
    assert statuses(Registry()) == {"fast": "missing dependency"}


def test_each_requirement_is_looked_up_once(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins share requirements, and reading a distribution's metadata takes about a millisecond."""
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        return "2.0"

    for number in range(3):
        toys.proposer(f"toy-{number}", f"proposer{number}", requires=("numpy>=1", "attrs<2"))
    monkeypatch.setattr("specdec.registry.policy.importlib_metadata.version", version)
    assert set(statuses(Registry()).values()) == {"missing dependency"}
    assert sorted(asked) == ["attrs", "numpy"]


@pytest.mark.parametrize("name", ["shut", "toy-shut", "Toy_Shut"])
def test_block_takes_names_of_plugins_and_of_distributions(toys: Toys, name: str) -> None:
    toys.proposer("toy-shut", "shut")
    toys.proposer("toy-good", "good")
    assert statuses(_registry(block=(name,))) == {"good": "ok", "shut": "blocked"}


def test_a_blocked_plugin_is_refused_with_the_setting(toys: Toys) -> None:
    toys.proposer("toy-shut", "shut")
    with pytest.raises(PluginBlockedError) as caught:
        _registry(block=("shut",)).select("proposer", "shut")
    assert str(caught.value) == (
        "The proposer 'shut' of toy-shut 1.0 is installed but may not be loaded: it is named in plugins.block. "
        "Take it out there to use it."
    )
    assert caught.value.setting == "plugins.block"


def test_a_plugin_outside_the_allow_list_is_refused_with_the_variable(toys: Toys) -> None:
    toys.proposer("toy-shut", "shut")
    toys.proposer("toy-good", "good")
    registry = _registry({"SPECDEC_PLUGINS_ALLOW": " good, toy-other"})
    assert statuses(registry) == {"good": "ok", "shut": "blocked"}
    with pytest.raises(PluginBlockedError) as caught:
        registry.select("proposer", "shut")
    assert "not named in SPECDEC_PLUGINS_ALLOW. Add it there to use it." in str(caught.value)


def test_the_environment_restricts_further_and_never_less(toys: Toys) -> None:
    for name in ("a", "b", "c"):
        toys.proposer(f"toy-{name}", name)
    environ = {"SPECDEC_PLUGINS_ALLOW": "b,c", "SPECDEC_PLUGINS_BLOCK": "c"}
    assert statuses(_registry(environ, allow=("a", "b"))) == {"a": "blocked", "b": "ok", "c": "blocked"}


def test_an_empty_allow_list_leaves_what_the_core_brings(toys: Toys) -> None:
    toys.proposer("toy-good", "good")
    toys.add("specdec-core", {"specdec.verifiers": {"plain": "toy_core.plugin"}}, version="0.1.0")
    assert statuses(_registry({"SPECDEC_PLUGINS_ALLOW": ""})) == {"good": "blocked", "plain": "ok"}
    assert statuses(_registry(allow=())) == {"good": "blocked", "plain": "ok"}


def test_names_that_match_nothing_are_warned_about(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    """Known bug 95: a misspelt name in an allow list must not be passed over in silence."""
    toys.proposer("toy-good", "good")
    with caplog.at_level(logging.WARNING):
        _registry({"SPECDEC_PLUGINS_ALLOW": "goood,bad"}).entries()
    assert (
        "SPECDEC_PLUGINS_ALLOW names 'goood', which is not installed. Did you mean 'good'? Known: good, toy-good."
        in caplog.messages
    )
    assert "SPECDEC_PLUGINS_ALLOW names 'bad', which is not installed. Known: good, toy-good." in caplog.messages


def test_a_preference_for_nothing_installed_is_warned_about(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    toys.proposer("toy-good", "good")
    with caplog.at_level(logging.WARNING):
        _registry(prefer={"good": "toy-gud"}).entries()
    assert caplog.messages == [
        "plugins.prefer names 'toy-gud', which is not installed. Did you mean 'toy-good'? Known: good, toy-good."
    ]


def _two_of_one_name(toys: Toys) -> None:
    toys.proposer("toy-first", "same", version="1.0")
    toys.add("toy-second", {"specdec.proposers": {"same": "toy_second.plugin"}}, version="2.0")


def test_two_distributions_of_one_name_are_refused_with_both(toys: Toys) -> None:
    _two_of_one_name(toys)
    with pytest.raises(PluginConflictError) as caught:
        Registry().select("proposer", "same")
    assert str(caught.value) == (
        "2 distributions offer the proposer 'same': toy-first 1.0 and toy-second 2.0. Choose one with "
        'plugins.prefer = {"same" = "toy-first"}, block one with plugins.block = ["toy-second"], or remove one: '
        "pip uninstall toy-second"
    )
    assert caught.value.distributions == ("toy-first", "toy-second")


def test_prefer_settles_a_conflict(toys: Toys) -> None:
    _two_of_one_name(toys)
    registry = _registry(prefer={"same": "toy_second"})
    assert registry.select("proposer", "same").distribution == "toy-second"
    assert {entry.distribution: entry.status for entry in registry.entries()} == {
        "toy-first": "blocked",
        "toy-second": "ok",
    }


def test_blocking_one_settles_a_conflict(toys: Toys) -> None:
    _two_of_one_name(toys)
    assert _registry(block=("toy-first",)).select("proposer", "same").distribution == "toy-second"


def test_prefer_for_a_distribution_that_offers_nothing_of_the_name_says_so(toys: Toys) -> None:
    _two_of_one_name(toys)
    with pytest.raises(PluginConflictError, match="plugins.prefer names 'toy-third' for it, which does not offer it"):
        _registry(prefer={"same": "toy-third"}).select("proposer", "same")


def test_one_name_in_two_kinds_is_no_conflict(toys: Toys) -> None:
    toys.proposer("toy-first", "same")
    toys.add("toy-second", {"specdec.verifiers": {"same": "toy_second.plugin"}})
    assert {entry.status for entry in Registry().entries()} == {"ok"}


@pytest.mark.parametrize(
    ("range_", "remedy"),
    [
        (">=99,<100", "Upgrade the core: pip install 'specdec-core<100,>=99'"),
        ("<0.1", "Upgrade the plugin: pip install --upgrade toy-other"),
        (">=0.0.1,<0.1", "Upgrade the plugin: pip install --upgrade toy-other"),
        ("==99.*", "Upgrade the core: pip install 'specdec-core==99.*'"),
    ],
)
def test_a_plugin_for_another_core_is_refused_with_both_versions(toys: Toys, range_: str, remedy: str) -> None:
    """Known bugs 98 and 100."""
    toys.proposer("toy-other", "other", requires=(f"specdec-core{range_}",), version="3.1")
    toys.proposer("toy-good", "good")
    registry = Registry()
    with pytest.raises(PluginVersionError) as caught:
        registry.load("proposer", "other")
    error = caught.value
    assert str(error) == (
        f"The proposer 'other' of toy-other 3.1 requires specdec-core {error.required}, but {error.core_version} is "
        f"installed. {remedy}"
    )
    assert registry.load("proposer", "good").implements("propose")


def test_a_plugin_without_a_range_for_the_core_loads(toys: Toys) -> None:
    toys.proposer("toy-loose", "loose", requires=())
    assert statuses(Registry()) == {"loose": "ok"}


def test_a_list_that_came_from_a_variable_is_named_after_it(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    """The configuration reads the same variables, so the list arrives twice."""
    toys.proposer("toy-shut", "shut")
    registry = _registry({"SPECDEC_PLUGINS_BLOCK": "shut,odd"}, block=("shut", "odd"))
    with caplog.at_level(logging.WARNING), pytest.raises(PluginBlockedError, match="named in SPECDEC_PLUGINS_BLOCK"):
        registry.select("proposer", "shut")
    assert len(caplog.records) == 1
