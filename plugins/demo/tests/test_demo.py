"""``specdec demo``."""

import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from specdec.cli import measuring
from specdec.cli.main import main
from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PluginConflictError
from specdec.metrics import EngineStats
from specdec.registry import Registry
from specdec.target.resolve import resolve_model
from specdec_demo import demo, methods


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from specdec.testing.models import tiny_model

    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


def test_texts_and_figures(model, capsys, tmp_path, monkeypatch):
    pytest.importorskip("specdec_ngram")
    monkeypatch.chdir(tmp_path)
    argv = ["demo", "--model", model, "--dtype", "float32", "--num-prompts", "2", "--max-tokens", "8", "--rounds", "1"]
    code = main(argv)
    out = capsys.readouterr().out
    assert code == 0
    assert "--- code_edit/humanevalpack-java-7 (edit_bugfix)" in out
    assert "--- mt_bench/121 (coding)" in out
    line = next(line for line in out.splitlines() if "ngram" in line and "│" in line)
    assert "100%" in line
    assert list(tmp_path.iterdir()) == []


def test_every_shown_method_runs_with_the_settings_it_is_shown_with(capsys, tmp_path, monkeypatch):
    """What ``make demo`` runs, but shorter."""
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--num-prompts", "1", "--max-tokens", "4", "--rounds", "1"]) == 0
    rows = {line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    heads = Registry().heads_for("demo:smollm2")
    shipped = [shown.method for shown in methods.SHOWN if shown.method in heads]
    assert {"plain", *shipped} <= rows
    assert shipped


def test_names_of_methods_are_whole_in_a_narrow_terminal():
    stats = EngineStats(
        num_drafts=10,
        num_draft_tokens=38,
        num_accepted_tokens=21,
        num_accepted_tokens_per_pos=(7, 6, 4, 4),
        num_draft_tokens_per_pos=(10, 10, 9, 9),
    )
    names = ["plain", *(shown.method for shown in methods.SHOWN)]
    variants = [measuring.Variant(name, demo.demo_config("m", "float32")) for name in names]
    for variant in variants:
        variant.runs.append(measuring.Run(round=0, seconds=1.0, num_tokens=50, stats=stats))
    console = Console(width=80, file=StringIO())
    console.print(demo.figures(variants))
    rows = {line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")}
    assert set(names) <= rows


def test_mistakes_are_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--rounds", "0"]) == 2
    assert main(["demo", "--model", "no/such/model/here", "--rounds", "1"]) == 2
    assert "no/such/model/here" in capsys.readouterr().err


def test_the_prompts_are_conversations_with_known_licences():
    prompts = demo.bundled_prompts()
    assert len(prompts) == 8
    assert all(prompt.messages for prompt in prompts)
    assert {prompt.id.partition("/")[0] for prompt in prompts} == {"code_edit", "mt_bench"}


class FakeRegistry:
    """Three proposers: one usable, one that needs a checkpoint, one with two providers."""

    def __init__(self, plugins):
        pass

    def entries(self):
        kinds = ("proposer", "proposer", "proposer", "head")
        names = ("suffix", "eagle", "eagle3", "eagle.llama")
        return [type("Entry", (), {"kind": kind, "name": name}) for kind, name in zip(kinds, names, strict=True)]

    def heads_for(self, target):
        return {}

    def plugin_config(self, kind, name, options):
        if name == "eagle" and "model" not in options:
            raise ConfigError("speculative.model is not set.")
        if name == "eagle3":
            raise PluginConflictError("two distributions offer 'eagle3'")
        return options


def test_methods_that_need_a_checkpoint_are_left_out(monkeypatch):
    monkeypatch.setattr(methods, "Registry", FakeRegistry)
    usable, left_out = methods.installed_methods(demo.demo_config("m", "float32"), 3)
    assert usable == [SpeculativeConfig(method="suffix", num_speculative_tokens=3)]
    as_shown, _ = methods.installed_methods(demo.demo_config("m", "float32"), None)
    assert as_shown == [shown for shown in methods.SHOWN if shown.method == "suffix"]
    assert sorted(left_out) == ["eagle", "eagle3"]
    assert "speculative.model" in left_out["eagle"]


def test_heads_belong_to_the_model_they_were_trained_for():
    methods = ("eagle", "eagle3", "medusa", "mlp_speculator")
    assert Registry().heads_for("demo:smollm2") == {method: f"demo:smollm2-{method}" for method in methods}
    assert Registry().heads_for("other") == {}
    for method in methods:
        assert resolve_model(f"demo:smollm2-{method}").path.name == method


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, specdec_demo.plugin; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
