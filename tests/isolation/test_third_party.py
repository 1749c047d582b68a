"""A proposer by somebody else, from the documentation alone: written in a scratch folder, installed, used by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/write-a-plugin.md"
pytestmark = [pytest.mark.isolation, pytest.mark.slow, pytest.mark.timeout(600)]

GENERATE = """
import json, sys
import torch
from specdec import LLM, SamplingParams

torch.set_num_threads(1)
settings = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 128, "stat_loggers": ()}
found = {}
for name, speculative in {"plain": None, "echo": {"method": "echo", "speculation": "always"}}.items():
    with LLM(sys.argv[1], **settings, speculative_config=speculative) as llm:
        prompt = {"prompt_token_ids": [5, 6, 7, 8]}
        outputs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
        found[name] = {"tokens": outputs[0].outputs[0].token_ids, "drafted": llm.stats().num_draft_tokens}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three files as the page has them."""
    folder = tmp_path_factory.mktemp("scratch") / "specdec-echo"
    for path, text in re.findall(r"```\w+ short=(\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own that the package is installed into."""
    target = tmp_path_factory.mktemp("target")
    build = tmp_path_factory.mktemp("build") / "source"
    shutil.copytree(source, build)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*command, build], check=True)
    return target


def _run(installed: Path, *arguments: str, cwd: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short(source: Path) -> None:
    lines = [line for path in source.rglob("*.*") if path.is_file() for line in path.read_text().splitlines()]
    assert 0 < len([line for line in lines if line.strip()]) < 40


def test_it_is_listed(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(_run(installed, "-m", "specdec.cli.main", "plugins", "--load", "--json", cwd=tmp_path))
    (echo,) = [entry for entry in listed if entry["name"] == "echo"]
    assert (echo["kind"], echo["distribution"], echo["status"]) == ("proposer", "specdec-echo", "ok")


def test_its_contract_holds(installed: Path, source: Path, tmp_path: Path) -> None:
    _run(installed, "-m", "pytest", "-q", "-c", os.devnull, str(source / "tests"), cwd=tmp_path)


def test_it_is_used_by_name(installed: Path, tmp_path: Path) -> None:
    from specdec.testing import tiny_model

    model = tiny_model("llama", tmp_path / "model")
    found = json.loads(_run(installed, "-c", GENERATE, str(model), cwd=tmp_path))
    assert found["echo"]["tokens"] == found["plain"]["tokens"]
    assert found["echo"]["drafted"] > 0
    assert found["plain"]["drafted"] == 0
