"""The plugin of docs/how-to/write-a-plugin.md, made from the page's own code blocks, installs and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/write-a-plugin.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on the path, with the page's distribution installed in it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for path, text in re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*command, source], check=True)
    shutil.copytree(source / "tests", target / "tests")
    return target


def _run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)


def test_it_is_listed_with_its_option(installed: Path) -> None:
    done = _run(installed, "-m", "specdec.cli.main", "plugins", "info", "parrot")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^distribution +specdec-parrot$", done.stdout, re.M)
    assert "speculative.max_repeats = 3  Most copies of the last token in one draft." in done.stdout


def test_it_proposes(installed: Path) -> None:
    code = """
import numpy as np
from specdec.registry import Registry
from specdec.types import ProposalInput
registry = Registry()
config = registry.plugin_config("proposer", "parrot", {"max_repeats": 2})
proposer = registry.create("proposer", "parrot", "propose", config=config, engine=None)
tokens = (np.array([5, 7]), np.array([9]))
draft = proposer.propose(
    ProposalInput(request_ids=("a", "b"), token_ids=tokens, max_draft_tokens=np.array([4, 1], dtype=np.int32))
)
print(draft.token_ids.tolist(), draft.num_draft_tokens.tolist())
"""
    done = _run(installed, "-c", code)
    assert done.stdout == "[7, 7, 9] [2, 1]\n", done.stderr


def test_its_own_tests_pass(installed: Path) -> None:
    done = _run(installed, "-m", "pytest", "-q", "-c", os.devnull, str(installed / "tests"))
    assert done.returncode == 0, done.stdout


def test_it_keeps_the_contract(installed: Path) -> None:
    done = _run(installed, "-m", "specdec.cli.main", "plugins", "check", "parrot")
    assert done.returncode == 0, done.stdout + done.stderr
