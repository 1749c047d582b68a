"""`specdec plugins`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.main import main

from .conftest import PROPOSER, Toys

OPTIONS = (
    PROPOSER
    + '''
from attrs import field, frozen


@frozen(kw_only=True)
class ToyConfig:
    depth: int = 3
    """How deep to look."""
    names: list[str] = field(factory=list)
    """Which to look for."""


@hookimpl
def config_class():
    return ToyConfig
'''
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("SPECDEC_CONFIG", raising=False)


def test_the_list_has_a_line_for_each_plugin_and_says_what_is_wrong(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.proposer("toy-good", "good", OPTIONS, version="1.2")
    toys.proposer("toy-old", "old", requires=("specdec-core<0.1",))
    toys.add("toy-bad", "[specdec.proposers]\nx\n")
    assert main(["plugins"]) == 0
    listed = capsys.readouterr().out
    assert main(["plugins", "list"]) == 0
    assert capsys.readouterr().out == listed
    lines = [" ".join(line.split()) for line in listed.splitlines()]
    assert lines[0] == "kind name distribution version hooks status"
    assert "proposer good toy-good 1.2 propose, config_class ok" in lines
    assert "proposer old toy-old 1.0 propose wrong core version" in lines
    assert "- - toy-bad 1.0 broken" in lines
    assert any(line.startswith("old of toy-old, wrong core version: requires specdec-core <0.1;") for line in lines)
    assert any(line.startswith("toy-bad, broken: its entry_points.txt cannot be parsed") for line in lines)


def test_the_list_as_json(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.proposer("toy-good", "good")
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "kind": "proposer",
            "name": "good",
            "distribution": "toy-good",
            "version": "1.0",
            "hooks": ["propose"],
            "status": "ok",
            "detail": "",
        }
    ]


def test_plugins_that_fail_on_import_are_found_when_asked_to(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    """Known bug 92: the list works and names the failures; `--load` is the strict switch."""
    toys.proposer("toy-good", "good")
    toys.proposer("toy-bad", "bad", "raise ImportError('no luck')")
    toys.proposer("toy-exit", "exit", "raise SystemExit(5)")
    assert main(["plugins", "--json"]) == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)} == {"ok"}
    assert main(["plugins", "--load", "--json"]) == 1
    loaded = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {name: entry["status"] for name, entry in loaded.items()} == {
        "good": "ok",
        "bad": "broken",
        "exit": "broken",
    }
    assert "ImportError: no luck" in loaded["bad"]["detail"]
    assert "SystemExit: 5" in loaded["exit"]["detail"]


def test_info_describes_a_plugin_and_its_options(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.proposer("toy-good", "good", OPTIONS)
    assert main(["plugins", "info", "good"]) == 0
    out = capsys.readouterr().out
    assert "distribution   toy-good\n" in out
    assert "requires core  <0.2,>=0.1\n" in out
    assert "  speculative.depth = 3  How deep to look.\n" in out
    assert main(["plugins", "info", "toy-good", "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert described["options"][1] == {
        "name": "speculative.names",
        "default": [],
        "required": False,
        "doc": "Which to look for.",
    }


def test_info_tells_what_must_be_given(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    """What has no default is required, and what has none by default is not set."""
    options = OPTIONS.replace("depth: int = 3", 'file: str | None = None\n    """Where to look."""\n    depth: int')
    toys.proposer("toy-needy", "needy", options)
    assert main(["plugins", "info", "needy"]) == 0
    out = capsys.readouterr().out
    assert "  speculative.depth (required)  How deep to look.\n" in out
    assert "  speculative.file (not set)  Where to look.\n" in out
    assert "None" not in out


def test_info_about_a_plugin_that_fails_on_import(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.proposer("toy-bad", "bad", "raise ImportError('no luck')")
    assert main(["plugins", "info", "bad"]) == 0
    assert "problem        The proposer 'bad' of toy-bad 1.0 is installed but cannot be" in capsys.readouterr().out


def test_info_about_nothing_known(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.proposer("toy-good", "good")
    assert main(["plugins", "info", "goood"]) == 2
    assert capsys.readouterr().err == "error: No plugin named 'goood' is installed. Did you mean 'good'?\n"
    assert main(["plugins", "info", "eagle3"]) == 2
    assert "It comes with pip install specdec-eagle." in capsys.readouterr().err


def test_the_configuration_of_the_folder_applies(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.proposer("toy-good", "good")
    Path("specdec.toml").write_text('model = "x"\n[plugins]\nblock = ["good"]\n')
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["detail"] == "named in plugins.block"
    Path("other.toml").write_text('[plugins]\nblok = ["good"]\n')
    assert main(["plugins", "--config", "other.toml"]) == 2
    assert "unknown setting 'plugins.blok'" in capsys.readouterr().err


# --- check --------------------------------------------------------------------------------------

REPEAT = """
import torch
from specdec.drafting.base import Proposer
from specdec.types import Draft


class Repeat(Proposer):
    def propose(self, batch):
        counts = torch.tensor(batch.max_draft_tokens.tolist(), dtype=torch.int32)
        last = torch.tensor([int(tokens[-1]) + {offset} for tokens in batch.token_ids], dtype=torch.int64)
        return Draft(token_ids=last.repeat_interleave(counts), num_draft_tokens=counts)
"""

HOOKS = """
from specdec.hookspecs import hookimpl


@hookimpl
def propose(config):
    from toy_repeat.method import Repeat

    return Repeat()
"""


def _check(toys: Toys, tmp_path: Path, offset: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _check_method(toys, tmp_path, REPEAT.format(offset=offset), *arguments)


def _check_method(toys: Toys, tmp_path: Path, method: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = toys.proposer("toy-repeat", "repeat", HOOKS, files={"toy_repeat/method.py": method})
    return subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "plugins", "check", "repeat", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_a_plugin_that_keeps_the_contract(toys: Toys, tmp_path: Path) -> None:
    done = _check(toys, tmp_path, 0, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["plugin"], report["passed"]) == ("proposer 'repeat' of toy-repeat 1.0", True)
    assert {check["outcome"] for check in report["checks"]} == {"passed"}
    assert "one token prompt" in {check["name"] for check in report["checks"]}
    assert report["propose_seconds"]["calls"] > 20
    assert report["propose_seconds"]["time_budget"] == 1.0


def test_a_plugin_that_breaks_the_contract(toys: Toys, tmp_path: Path) -> None:
    done = _check(toys, tmp_path, 64)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("Contract tests of the proposer 'repeat' of toy-repeat 1.0\n")
    assert re.search(r"^failed +\d+\.\d\d  well formed: Shapes, dtypes, counts", done.stdout, re.M)
    assert re.search(r"^failed +\d+\.\d\d  limits \(4 cases\): ", done.stdout, re.M)
    assert "\nwell formed failed:\n" in done.stdout
    assert "token_ids leave the vocabulary of 64" in done.stdout
    assert re.search(r"^passed +\d+\.\d\d  empty batch: ", done.stdout, re.M)
    assert re.search(r"^\d+ passed, \d+ failed, \d+ skipped in \d", done.stdout, re.M)


def test_a_proposer_that_cannot_load_is_told_in_words(toys: Toys, tmp_path: Path) -> None:
    method = REPEAT.format(offset=0) + "\n    def load(self, target):\n        open('weights.bin')\n"
    done = _check_method(toys, tmp_path, method)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    line = 1 + method.splitlines().index("        open('weights.bin')")
    told = f"toy_repeat/method.py, line {line}, in load: open('weights.bin')"
    assert "Repeat.load() raised FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'" in done.stdout
    assert told in done.stdout
    assert "An engine with this proposer does not start. Correct that line; " in done.stdout
    assert "0 passed, 1 failed, 0 skipped" in done.stdout


def test_a_method_that_raises_is_told_in_words(toys: Toys, tmp_path: Path) -> None:
    """Also where a library raises, which was called wrongly."""
    method = REPEAT.format(offset=0) + "\n    def finish(self, request_id):\n        torch.zeros(2).view(3)\n"
    done = _check_method(toys, tmp_path, method, "--json")
    assert done.returncode == 1
    failed = [check for check in json.loads(done.stdout)["checks"] if check["outcome"] == "failed"]
    assert {check["name"] for check in failed} >= {"one token prompt", "start then finish"}
    for check in failed:
        first, place, effect, *_ = check["message"].splitlines()
        assert first.startswith("Repeat.finish() raised RuntimeError: shape '[3]' is invalid")
        assert place.endswith(", in finish: torch.zeros(2).view(3)")
        assert effect.startswith("The engine counts it as a fault, goes on, and switches the proposer off after 3")


def test_slow_proposers_are_told_what_an_engine_does_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    from specdec.cli.plugin_check import Check, Report
    from specdec.cli.plugin_faults import ProposeTimes
    from specdec.types import Needs

    passed = (Check("limits", "", "passed"),)
    slow = Report("proposer 'slow'", passed, ProposeTimes.of((1.2, 0.002, 1.4), Needs()))
    slow.print()
    out = " ".join(capsys.readouterr().out.split())
    assert slow.passed, "a warning, no failure: this machine may be slow or busy"
    assert "propose() took 1.20 s at the median of 3 steps, 1.40 s at most; an engine allows 1.00 s a step" in out
    assert "warning: 2 of 3 calls of propose() took longer than the 1.00 s of proposer_time_budget. " in out
    assert "switches the proposer off after 3 in a row (max_proposer_faults)" in out
    assert slow.as_dict()["warnings"] == slow.warnings
    fast = Report("proposer 'fast'", passed, ProposeTimes.of((0.002,), Needs(hidden_states=True)))
    fast.print()
    out = " ".join(capsys.readouterr().out.split())
    assert "took 2.00 ms at the median" in out
    assert "and the target's own time on top" in out
    assert fast.warnings == []


def test_kinds_without_a_contract_and_names_of_several_kinds(toys: Toys, capsys: pytest.CaptureFixture[str]) -> None:
    toys.add("toy-head", {"specdec.heads": {"same": "toy_head"}, "specdec.verifiers": {"same": "toy_head"}})
    assert main(["plugins", "check", "same"]) == 2
    assert capsys.readouterr().err == (
        "error: Plugins of 2 kinds are called 'same': head, verifier. Say which is meant with --kind.\n"
    )
    toys.add("toy-order", {"specdec.commands": {"order": "toy_order"}})
    assert main(["plugins", "check", "order"]) == 2
    assert "'order' is a command, and there are no contract tests for commands" in capsys.readouterr().err
    assert main(["plugins", "check", "same", "--kind", "head", "--options", "[1]"]) == 2
    assert "not a JSON object" in capsys.readouterr().err


NEEDS = """
[[needs]]
plugin = "{name}"
any_path = ["/dev/there-is-none", "{path}"]
otherwise = "needs an abacus, and this machine has none"
"""


def test_what_the_machine_lacks_is_told_without_importing(
    toys: Toys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in (("lacking", "/dev/neither"), ("served", str(tmp_path))):
        files = {f"toy_{name}/specdec_machine.toml": NEEDS.format(name=name, path=path)}
        toys.proposer(f"toy-{name}", name, files=files)
    toys.proposer("toy-odd", "odd", files={"toy_odd/specdec_machine.toml": "[[needs]]\nplugin = 3\n"})
    assert main(["plugins", "--json"]) == 0
    found = {entry["name"]: (entry["status"], entry["detail"]) for entry in json.loads(capsys.readouterr().out)}
    assert found["lacking"] == ("not on this machine", "needs an abacus, and this machine has none")
    assert found["served"] == ("ok", "")
    assert "specdec_machine.toml is malformed: a table must have exactly the keys" in found["odd"][1]
    assert not {"toy_lacking", "toy_served"} & set(sys.modules)
    assert main(["plugins"]) == 0
    assert "lacking of toy-lacking, not on this machine: needs an abacus" in capsys.readouterr().out
    assert main(["plugins", "info", "lacking"]) == 0
    assert "not on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--depth", "--deep-depth", "--speculative.depth=3"])
def test_an_option_that_belongs_to_a_method_is_told_with_its_method(
    toys: Toys, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with the method's name before it, as some are in vLLM."""
    toys.proposer("toy-deep", "deep", OPTIONS)
    toys.proposer("toy-broken", "broken", "import nothing_of_the_kind\n")
    assert main(["chat", "m", option, "3"]) == 2
    told = "It is an option of the method 'deep', given as --set speculative.depth=VALUE. See: specdec chat --help"
    assert capsys.readouterr().err == f"error: unknown option {option.partition('=')[0]!r}. {told}\n"
    toys.proposer("toy-other", "other", OPTIONS)
    assert main(["chat", "m", "--depth", "3"]) == 2
    assert "of the methods 'deep' and 'other', given as" in capsys.readouterr().err
    assert main(["chat", "m", "--dapth", "3"]) == 2
    assert "option of the method" not in capsys.readouterr().err


REFUSING = """
from specdec.errors import ConfigError
from specdec.hookspecs import hookimpl


@hookimpl
def check(config, engine):
    raise ConfigError("speculative.model: it is something else.", path="speculative.model")


@hookimpl
def propose(config, engine):
    raise AssertionError("built all the same")
"""


def test_check_asks_the_plugin_first_whether_it_can_serve_the_target(
    toys: Toys, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.proposer("toy-careful", "careful", REFUSING)
    assert main(["plugins", "check", "careful"]) == 2
    assert capsys.readouterr().err == "error: speculative.model: it is something else.\n"
