"""Runs the contract tests of `specdec.testing.contracts` against an installed plugin, and reports in words.

Needs the packages of ``specdec-core[test]``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from rich.text import Text

from specdec.cli.console import make_console
from specdec.config import from_kwargs, to_dict
from specdec.errors import PluginKindError
from specdec.registry.catalogue import KINDS
from specdec.target.model import TargetModel
from specdec.testing import contracts, engine_context, tiny_module

if TYPE_CHECKING:
    from specdec.registry import Registry
    from specdec.registry.loading import Plugin
    from specdec.types import EngineContext

CONTRACTS = {
    "proposer": ("ProposerContract", "proposer"),
    "verifier": ("VerifierContract", "verifier"),
    "attention_backend": ("AttentionBackendContract", "backend"),
}
"""Kind -> the contract class and the fixture it asks for."""

_MODULE = """\
import pytest
from specdec.testing.contracts import {contract}


class TestInstalled({contract}):
    plugin = {module!r}
    distribution = {distribution!r}

    @pytest.fixture
    def {fixture}(self, build_plugin):
        return build_plugin(self)
"""


_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


@attrs.frozen
class Check:
    """One contract test."""

    name: str
    meaning: str
    outcome: str
    """'passed', 'failed' or 'skipped'."""
    message: str = ""


@attrs.frozen
class Report:
    """All contract tests of one plugin."""

    plugin: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether some checks ran and none failed."""
        outcomes = {check.outcome for check in self.checks}
        return "passed" in outcomes and "failed" not in outcomes

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"plugin": self.plugin, "passed": self.passed, "checks": [attrs.asdict(check) for check in self.checks]}

    def print(self) -> None:
        """Write the report for people."""
        console = make_console()
        console.print(f"Contract tests of the {self.plugin}", markup=False)
        for (name, meaning), cases in self._grouped().items():
            worst = next(
                outcome for outcome in ("failed", "passed", "skipped") if outcome in {c.outcome for c in cases}
            )
            count = f" ({len(cases)} cases)" if len(cases) > 1 else ""
            console.print(Text(f"  {worst:<8}", style=_STYLES[worst]), Text(f"{name}{count}: {meaning}"))
            for case in cases:
                if case.outcome != "passed" and case.message:
                    console.print(
                        Text(_indented(f"{case.name} {case.outcome}: {case.message}"), style=_STYLES[case.outcome])
                    )
        counts = {outcome: sum(check.outcome == outcome for check in self.checks) for outcome in _STYLES}
        console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))

    def _grouped(self) -> dict[tuple[str, str], list[Check]]:
        """The checks by test; a test with parameters has several."""
        groups: dict[tuple[str, str], list[Check]] = {}
        for check in self.checks:
            groups.setdefault((check.name.partition("[")[0], check.meaning), []).append(check)
        return groups


def check(registry: Registry, kind: str, name: str, options: Mapping[str, Any]) -> Report:
    """Run the contract tests against a plugin.

    Args:
        registry: where the plugin comes from.
        kind: a kind with a contract.
        name: the plugin's name.
        options: options for its configuration class.

    Raises:
        PluginKindError: there is no contract for this kind.
        SpecdecError: the plugin cannot be loaded or built.
    """
    if kind not in CONTRACTS:
        raise PluginKindError(
            f"{name!r} is a {KINDS[kind].label}, and there are no contract tests for {KINDS[kind].label}s; there are "
            f"for {', '.join(CONTRACTS)}.",
            kind=kind,
            name=name,
        )
    plugin = registry.load(kind, name)
    config = registry.plugin_config(kind, name, options)
    build = _builder(plugin, config)
    build(getattr(contracts, CONTRACTS[kind][0]))  # what cannot be built at all is told once, not by every test
    recorder = _Recorder(build)
    with tempfile.TemporaryDirectory() as folder:
        pytest.main(_arguments(Path(folder), plugin), plugins=[recorder])
    return Report(registry.describe(kind, name), tuple(recorder.checks))


def _arguments(folder: Path, plugin: Plugin) -> list[str]:
    """Write the test module and settings of its own, so that the user's pytest configuration plays no part."""
    entry = plugin.entry
    contract, fixture = CONTRACTS[str(entry.kind)]
    text = _MODULE.format(
        contract=contract, fixture=fixture, module=entry.found.module, distribution=entry.distribution
    )
    module, settings = folder / "test_installed.py", folder / "pytest.ini"
    module.write_text(text, encoding="utf-8")
    settings.write_text("[pytest]\n", encoding="utf-8")
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    return [str(module), "-c", str(settings), "--import-mode=importlib", *quiet]


# --- building the plugin's object ---------------------------------------------------------------


def _builder(plugin: Plugin, config: Any) -> Callable[[Any], Any]:
    """A function that makes a new object for a contract class, by the plugin's hook, for a tiny random target."""
    kind = str(plugin.entry.kind)
    hook = KINDS[kind].hook
    target: Any = None

    def build(contract: Any) -> Any:
        nonlocal target
        if target is None:
            sizes = {"vocab_size": getattr(contract, "vocab_size", 64)}
            module = tiny_module("llama", **sizes)
            target = TargetModel.from_model(module, name="tiny random llama", path=None, tokenizer=None, fuse=False)
        context = _context(target, contract)
        if kind == "attention_backend":
            return plugin.build(hook, requirements=target.requirements(contract.block_size), engine=context)
        built = plugin.build(hook, config=config, engine=context)
        if kind == "proposer":
            built.load(target)
        return built

    return build


def _context(target: Any, contract: Any) -> EngineContext:
    sizes = ("max_model_len", "num_speculative_tokens", "block_size")
    declared = {name: getattr(contract, name) for name in sizes if hasattr(contract, name)}
    settings = to_dict(from_kwargs(target.info.model))
    return engine_context(target_info=target.info, target=target, settings=settings, **declared)


class _Recorder:
    """A pytest plugin that keeps the results, and hands the test class the object to test."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.checks: list[Check] = []
        self._build = build
        self._meanings: dict[str, str] = {}

    @pytest.fixture
    def build_plugin(self) -> Callable[[Any], Any]:
        """The fixture of the generated module."""
        return self._build

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remember what each test is about."""
        for item in items:
            docstring = getattr(item, "function", None).__doc__ or ""
            self._meanings[item.nodeid] = docstring.strip().partition("\n")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep one result for each test: of its call, or of the setup that did not get that far."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
            told = report.longrepr
            reason = told[2].removeprefix("Skipped: ") if isinstance(told, tuple) else report.longreprtext
            self.checks.append(Check(name, self._meanings[report.nodeid], report.outcome, reason))


def _indented(text: str) -> str:
    """The last lines of a message, where pytest says what was wrong."""
    first, *rest = text.splitlines() or [""]
    return "\n".join(f"           {line}" for line in (first, *rest[-12:]))
