"""Listing plugins, and every module that does so, leaves the heavy libraries alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numba", "numpy", "matplotlib")


def _imported_by(code: str) -> list[str]:
    report = f"{code}\nimport json, sys\nprint('\\n' + json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "module",
    [
        "specdec",
        "specdec.cli.main",
        "specdec.cli.plugins",
        "specdec.config",
        "specdec.errors",
        "specdec.hookspecs",
        "specdec.registry",
        "specdec.types",
        "specdec.verify.plugin",
        "specdec.attention.plugin",
        "specdec.metrics.plugin",
    ],
)
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    assert _imported_by(f"import {module}") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["plugins"],
        ["plugins", "--json"],
        ["plugins", "--load"],
        ["plugins", "info", "match"],
    ],
)
def test_the_commands_that_list_and_explain_import_nothing_heavy(arguments: list[str]) -> None:
    assert _imported_by(f"from specdec.cli.main import main\nmain({arguments})") == []


DECODE = """
import sys
from specdec import LLM
from specdec.sampling.params import SamplingParams
with LLM(sys.argv[1], dtype="bfloat16", max_model_len=64, kv_cache_memory="4MiB") as llm:
    for options in ({"temperature": 0.0}, {"top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2}):
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, **options), use_tqdm=False)
print(*set(sys.argv[2:]) & set(sys.modules))
"""

NOT_FOR_DECODING = (
    "numba", "llvmlite", "matplotlib", "pandas", "scipy", "sklearn", "torch._dynamo", "torch._inductor", "triton",
    "transformers.trainer", "transformers.pipelines", "fastapi", "uvicorn", "prometheus_client", "specdec.testing",
)  # fmt: skip


def test_a_process_that_decodes_has_no_compiler_in_it(tmp_path: Path) -> None:
    """Kernels come from a shared library: numba and LLVM would take over 100 MB. Nor is there anything else that takes
    long to import and that other commands need."""
    from specdec.testing import tiny_model

    command = [sys.executable, "-c", DECODE, str(tiny_model("llama", tmp_path)), *NOT_FOR_DECODING]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


SCAN = """
import importlib.metadata, sys
from specdec.registry import Registry

opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
Registry().entries()
print(len([name for name in opened if not name.endswith(".zip")]), len(list(importlib.metadata.distributions())))
"""


def test_a_scan_of_the_environment_opens_few_files() -> None:
    """What keeps it at about 20 ms: the metadata and entry points of distributions, each a few times, and no more."""
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, check=True)
    opened, distributions = map(int, done.stdout.split())
    assert 0 < opened <= 4 * distributions
