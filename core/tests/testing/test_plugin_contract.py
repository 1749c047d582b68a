"""The checks of packaging, and how known failures are declared."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from specdec.hookspecs import hookimpl
from specdec.testing.contracts import PluginContract


def contract(plugin: str | None = None, distribution: str | None = None) -> PluginContract:
    return type("Contract", (PluginContract,), {"plugin": plugin, "distribution": distribution})()


def test_sound_plugin() -> None:
    """The built-in verifier's module passes."""
    contract("specdec.verify.plugin").test_plugin_imports_without_torch()
    contract("specdec.verify.plugin").test_hooks_are_declared()


def test_heavy_import_is_caught() -> None:
    """A plugin module that imports torch is named, with what it imports."""
    with pytest.raises(AssertionError, match="torch"):
        contract("specdec.testing.oracles").test_plugin_imports_without_torch()


def test_broken_import_is_caught() -> None:
    """A plugin module that cannot be imported fails."""
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        contract("specdec_no_such_plugin").test_plugin_imports_without_torch()


def module(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> str:
    made = types.ModuleType("contract_test_plugin")
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def test_unknown_hook_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt hook or argument is an error; so is a module without hooks."""

    @hookimpl
    def proposes(config: Any) -> None: ...

    @hookimpl
    def propose(configuration: Any) -> None: ...

    with pytest.raises(Exception, match="proposes"):
        contract(module(monkeypatch, proposes=proposes)).test_hooks_are_declared()
    with pytest.raises(Exception, match="configuration"):
        contract(module(monkeypatch, propose=propose)).test_hooks_are_declared()
    with pytest.raises(AssertionError, match="no hook"):
        contract(module(monkeypatch)).test_hooks_are_declared()


@pytest.mark.parametrize(
    ("requirement", "complaint"),
    [
        ("numpy", "does not require"),
        ("specdec-core", "no lower bound"),
        ("specdec-core>=0.1", "no upper bound"),
        ("specdec-core<9", "no lower bound"),
        ("specdec-core==0.0.1", "no lower bound"),
        ("specdec-core>=8,<9", "leaves out"),
    ],
)
def test_core_range(monkeypatch: pytest.MonkeyPatch, requirement: str, complaint: str) -> None:
    """The range must be there, bounded, and hold the installed core."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [requirement])
    with pytest.raises(AssertionError, match=complaint):
        contract(distribution="some-plugin").test_core_version_range()


def test_good_core_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range around the installed version passes."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["specdec-core[plot]<9,>=0.0.1"])
    contract(distribution="some-plugin").test_core_version_range()


# --- known failures -----------------------------------------------------------------------------

SUBCLASSES = """\
from specdec.testing.contracts import PluginContract


class Base(PluginContract):
    good = False

    def test_something(self):
        assert self.good


class TestKnown(Base):
    known_failures = {"test_something": "not yet"}


class TestUnknown(Base):
    pass


class TestMended(Base):
    good = True
    known_failures = {"test_something": "not yet"}
"""


class Outcomes:
    """A pytest plugin that keeps the outcome of each `test_something`."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and "test_something" in report.nodeid:
            name = report.nodeid.split("::")[1]
            self.outcomes[name] = "xfailed" if hasattr(report, "wasxfail") else report.outcome


def test_known_failures_are_strict(tmp_path: Path) -> None:
    """A known failure is expected for its class alone, and one that passes must be removed."""
    (tmp_path / "test_known.py").write_text(SUBCLASSES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    kept = Outcomes()
    options = ["-c", str(tmp_path / "pytest.ini"), "-p", "no:terminal", "-p", "no:cacheprovider"]
    pytest.main([str(tmp_path / "test_known.py"), "--import-mode=importlib", *options], plugins=[kept])
    assert kept.outcomes == {"TestKnown": "xfailed", "TestUnknown": "failed", "TestMended": "failed"}


def test_known_failures_name_checks() -> None:
    """A misspelt check is told when the class is made."""
    with pytest.raises(TypeError, match="test_nothing"):
        type("Contract", (PluginContract,), {"known_failures": {"test_nothing": "why"}})
