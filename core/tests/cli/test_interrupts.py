"""Ctrl-C while an engine starts ends the program at once, with 130 and without a word, wherever it strikes."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.testing import tiny_model

STAGES = (
    "specdec.cli.generate.read_config",
    "specdec.registry.registry.discover",
    "transformers.AutoConfig.from_pretrained",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.LlamaForCausalLM.from_pretrained",
    "specdec.target.trace.dense_attention",
    "specdec.target.fused_layer.FusedLayers.run",
    "specdec.target.model.allocate_kv_cache",
    "specdec.engine.build.warm_up",
    "specdec.engine.scheduler.Scheduler.schedule",
)
"""Something that runs in each stage, from the first setting to the first step."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def place(stage: str) -> tuple[Any, str]:
    """The module or class that holds it, and its name there."""
    path, _, name = stage.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name


def generate(model: Path) -> int:
    settings = ["--dtype", "float32", "--kv-cache-memory", "4MiB", "--max-model-len", "64", "--max-tokens", "4"]
    return main(["generate", "--model", str(model), *settings, "hello"])


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_no_mistake_of_a_model_or_plugin(
    stage: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(*place(stage), interrupt)
    assert generate(model) == 130
    assert capsys.readouterr() == ("", "\n")
    assert gc.isenabled()


def test_the_next_start_is_like_the_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model) == 0
    said = capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(*place("specdec.target.fused_layer.FusedLayers.run"), interrupt)
        assert generate(model) == 130
    capsys.readouterr()
    assert generate(model) == 0
    assert capsys.readouterr() == said


SIGNAL = """
import signal, sys
import specdec.target.loading as loading
from specdec.cli.entry import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in its background

def check(path):
    signal.raise_signal(signal.SIGINT)

loading.check_weight_files = check
sys.exit(main())
"""


def test_the_signal_itself(model: Path) -> None:
    command = [sys.executable, "-c", SIGNAL, "generate", "--model", str(model), "hello"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")
