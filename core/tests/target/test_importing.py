"""What importing transformers and making its models costs; each case in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_files_are_read_once() -> None:
    code = """
import builtins, collections, io
read = collections.Counter()
before = builtins.open
def counting(file, *args, **settings):
    read[str(file)] += 1
    return before(file, *args, **settings)
builtins.open = counting
from specdec.target.importing import import_transformers
import_transformers()
models = [name for name in read if "transformers/models/" in name]
print(len(models) > 1000, max(read[name] for name in models))
"""
    assert run(code) == "True 1"


def test_transformers_finds_the_same_classes() -> None:
    listed = "import transformers.models as m, transformers as t; print(sorted(t.__all__), sorted(m.__all__))"
    improved = f"from specdec.target.importing import import_transformers; import_transformers(); {listed}"
    assert run(improved) == run(listed)


@pytest.mark.parametrize("text", ["", "x = 1\n", "__all__ = ['a']\n", "a\n__all__ = ['a']\nb\n__all__ = [\n  'c'\n]\n"])
def test_only_the_last_list_of_names_counts(text: str) -> None:
    from transformers.utils.import_utils import fetch__all__

    from specdec.target.importing import _from_last_all

    assert fetch__all__(_from_last_all(text)) == fetch__all__(text)


def test_transformers_that_is_there_already_is_left_alone() -> None:
    code = """
import transformers
from specdec.target.importing import import_transformers
import_transformers()
from transformers.utils import is_torch_distributed_available
import torch
print(is_torch_distributed_available(), torch.distributed.is_available())
"""
    assert run(code) == "True True"


@pytest.mark.parametrize(
    ("forgo", "setting", "told"), [("forgo", "", False), ("forgo", "1", True), ("", "", True), ("", "1", True)]
)
def test_transformers_knows_other_processes_unless_it_is_left_out(forgo: str, setting: str, told: bool) -> None:
    code = """
import os, sys
if sys.argv[2]:
    os.environ["WORLD_SIZE"] = sys.argv[2]
from specdec.target.importing import forgo_distributed, import_transformers
if sys.argv[1]:
    forgo_distributed()
import_transformers()
from transformers.utils import is_torch_distributed_available
import torch
print(is_torch_distributed_available(), torch.distributed.is_available())
"""
    assert run(code, forgo, setting) == f"{told} True"


def test_torch_is_as_before_after_a_model_was_made() -> None:
    code = """
import torch
from specdec.target.importing import without_symbols
before = {**vars(torch.nn.init)}, torch.arange
with without_symbols(), torch.device("meta"):
    linear = torch.nn.Linear(2, 2)
    print(linear.weight.device, torch.arange(2).device, torch.arange(2, device="meta").device)
assert ({**vars(torch.nn.init)}, torch.arange) == before
with torch.device("meta"):
    print(torch.arange(2).device)
"""
    assert run(code).split() == ["meta", "cpu", "meta", "meta"]


def test_a_model_whose_angles_are_made_on_both_devices(tmp_path: Path) -> None:
    from specdec.config import EngineConfig
    from specdec.target.model import load_target
    from specdec.testing import tiny_model

    path = tiny_model("gemma4_text", tmp_path / "model")
    target = load_target(EngineConfig(model=str(path), dtype="float32", device="cpu"))
    assert target.info.model_type == "gemma4_text"
