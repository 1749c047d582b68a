"""Runs the contract tests of `specdec.testing.contracts` against an installed plugin, and reports in words.

Needs the packages of ``specdec-core[test]``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from rich.table import Table
from rich.text import Text

from specdec.cli.console import make_console
from specdec.cli.plugin_faults import ProposeTimes, explained
from specdec.cli.plugin_subject import subject_of
from specdec.errors import PluginKindError, SpecdecError
from specdec.registry.catalogue import KINDS
from specdec.testing import contracts
from specdec.wording import cause_of

if TYPE_CHECKING:
    from specdec.registry import Registry
    from specdec.registry.loading import Plugin

CONTRACTS = {
    "proposer": ("ProposerContract", "proposer"),
    "verifier": ("VerifierContract", "verifier"),
    "attention_backend": ("AttentionBackendContract", "backend"),
    "head": ("DraftHeadContract", "head"),
    "grammar": ("GrammarBackendContract", "backend"),
    "logits_processor": ("LogitsProcessorContract", "processor"),
    "stat_logger": ("StatLoggerContract", "stat_logger"),
    "sampling_backend": ("SamplingBackendContract", "backend"),
}
"""Kind -> the contract class and the fixture it asks for."""

_MODULE = """\
import pytest
from specdec.testing.contracts import {contract}


class TestInstalled({contract}):
    {sizes}
    plugin = {module!r}
    distribution = {distribution!r}

    @pytest.fixture
    def {fixture}(self, build_plugin):
        return build_plugin(self)
"""


_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}

_STARTS = "An engine that starts builds the plugin's object, and a proposer loads what it needs."


@attrs.frozen
class Check:
    """One contract test."""

    name: str
    meaning: str
    outcome: str
    """'passed', 'failed' or 'skipped'."""
    message: str = ""
    seconds: float = 0.0


@attrs.frozen
class Report:
    """All contract tests of one plugin."""

    plugin: str
    checks: tuple[Check, ...]
    propose_times: ProposeTimes | None = None
    """Of a proposer."""

    @property
    def warnings(self) -> list[str]:
        """What breaks no contract, and an engine would not bear."""
        slow = self.propose_times.warning() if self.propose_times else None
        return [slow] if slow else []

    @property
    def passed(self) -> bool:
        """Whether some checks ran and none failed."""
        outcomes = {check.outcome for check in self.checks}
        return "passed" in outcomes and "failed" not in outcomes

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "plugin": self.plugin,
            "passed": self.passed,
            "checks": [attrs.asdict(check) for check in self.checks],
            "propose_seconds": self.propose_times.as_dict() if self.propose_times else None,
            "warnings": self.warnings,
        }

    def print(self) -> None:
        """Write the report for people: a table of tests, then why some failed or were left out."""
        console = make_console()
        console.print(f"Contract tests of the {self.plugin}", markup=False)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column, justify in (("result", "left"), ("seconds", "right"), ("test", "left")):
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for (name, meaning), cases in self._grouped().items():
            outcomes = {case.outcome for case in cases}
            worst = next(outcome for outcome in ("failed", "passed", "skipped") if outcome in outcomes)
            count = f" ({len(cases)} cases)" if len(cases) > 1 else ""
            seconds = f"{sum(case.seconds for case in cases):.2f}"
            table.add_row(Text(worst, style=_STYLES[worst]), seconds, Text(f"{name}{count}: {meaning}"))
        console.print(table)
        for case in self.checks:
            if case.outcome == "failed":
                console.print(Text(f"\n{case.name} failed:", style=_STYLES[case.outcome]))
                console.print(Text(_indented(case.message)), soft_wrap=True)
        for reason, names in self._left_out().items():
            console.print(Text(f"\nskipped, {reason}: {', '.join(names)}", style=_STYLES["skipped"]))
        if self.propose_times:
            console.print(Text(f"\n{self.propose_times.line()}"), soft_wrap=True)
        for warning in self.warnings:
            console.print(Text(f"\nwarning: {warning}", style="yellow"), soft_wrap=True)
        counts = {outcome: sum(check.outcome == outcome for check in self.checks) for outcome in _STYLES}
        console.print(
            "\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
            f"in {sum(check.seconds for check in self.checks):.1f} s",
        )

    def _left_out(self) -> dict[str, list[str]]:
        """The tests that were skipped, by reason."""
        found: dict[str, list[str]] = {}
        for case in self.checks:
            if case.outcome == "skipped":
                found.setdefault(case.message, []).append(case.name)
        return found

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
    subject = subject_of(registry, plugin, dict(options))
    label = registry.describe(kind, name)
    # what cannot be built at all is told once, not by every test
    try:
        built = subject.build(type("Contract", (getattr(contracts, CONTRACTS[kind][0]),), dict(subject.sizes)))
    except SpecdecError:
        raise
    except Exception as error:
        told = explained(error, kind) or cause_of(error)
        return Report(label, (Check("start", _STARTS, "failed", told),))
    recorder = _Recorder(subject.build, kind)
    with tempfile.TemporaryDirectory() as folder:
        pytest.main(_arguments(Path(folder), plugin, subject.sizes), plugins=[recorder])
    times = ProposeTimes.of(recorder.propose_seconds, built.needs) if recorder.propose_seconds else None
    return Report(label, tuple(recorder.checks), times)


def _arguments(folder: Path, plugin: Plugin, sizes: Mapping[str, int]) -> list[str]:
    """Write the test module and settings of its own, so that the user's pytest configuration plays no part."""
    entry = plugin.entry
    contract, fixture = CONTRACTS[str(entry.kind)]
    text = _MODULE.format(
        contract=contract,
        fixture=fixture,
        module=entry.found.module,
        distribution=entry.distribution,
        sizes="; ".join(f"{name} = {value!r}" for name, value in sizes.items()) or "pass",
    )
    module, settings = folder / "test_installed.py", folder / "pytest.ini"
    module.write_text(text, encoding="utf-8")
    settings.write_text("[pytest]\n", encoding="utf-8")
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    return [str(module), "-c", str(settings), "--import-mode=importlib", *quiet]


class _Recorder:
    """A pytest plugin that keeps the results, and hands the test class the object to test."""

    def __init__(self, build: Callable[[Any], Any], kind: str) -> None:
        self.checks: list[Check] = []
        self.propose_seconds: list[float] = []
        self._build = build
        self._kind = kind
        self._meanings: dict[str, str] = {}
        self._explained: dict[str, str] = {}
        """What a plugin's method raised, by test."""

    @pytest.fixture
    def build_plugin(self) -> Callable[[Any], Any]:
        """The fixture of the generated module."""

        def build(contract: Any) -> Any:
            if hasattr(contract, "note_time"):
                contract.note_time = self.propose_seconds.append
            return self._build(contract)

        return build

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Look at what was raised while it can be seen."""
        report = yield
        told = explained(call.excinfo.value, self._kind) if report.failed and call.excinfo else None
        if told is not None:
            self._explained[item.nodeid] = told
        return report

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
            reason = self._explained.get(report.nodeid, reason)
            self.checks.append(
                Check(name, self._meanings[report.nodeid], report.outcome, reason, round(report.duration, 4))
            )


def _indented(text: str) -> str:
    """The last lines of a message, where pytest says what was wrong."""
    first, *rest = text.splitlines() or [""]
    return "\n".join(f"    {line}" for line in (first, *rest[-12:]))
