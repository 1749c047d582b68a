"""Wheels in an environment of their own: the core alone works, a method comes and goes with its package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.isolation, pytest.mark.slow, pytest.mark.timeout(1800)]

GENERATE = """
import json, sys
from pathlib import Path
import torch
from specdec import LLM, SamplingParams

torch.set_num_threads(1)
method = json.loads(sys.argv[2])
with LLM(sys.argv[1], dtype="float32", kv_cache_memory="8MiB", max_model_len=128, speculative_config=method) as llm:
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 6}
    outputs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    print(json.dumps({"tokens": outputs[0].outputs[0].token_ids, "drafts": llm.stats().spec.num_drafts}, default=list))
"""

MAKE_MODEL = "import sys; from specdec.testing import tiny_model; print(tiny_model('llama', sys.argv[1]))"


class Environment:
    """A fresh virtual environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._python = folder / "bin" / "python"

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run its Python, away from the workspace."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPECDEC"))}
        done = subprocess.run(
            [self._python, *arguments], env=environ, cwd=self._python.parents[2], capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def pip(self, *arguments: str) -> None:
        """Run its pip."""
        self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def specdec(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the installed command."""
        return self.run("-m", "specdec.cli.main", *arguments, check=check)

    def generate(self, model: Path, speculative: dict[str, object] | None = None, check: bool = True):  # type: ignore[no-untyped-def]
        """Greedy decoding of one prompt; the finished process."""
        return self.run("-c", GENERATE, str(model), json.dumps(speculative), check=check)

    def plugins(self) -> dict[str, str]:
        """Name and distribution of what is installed."""
        return {entry["name"]: entry["distribution"] for entry in json.loads(self.specdec("plugins", "--json").stdout)}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of every package, by distribution name."""
    folder = tmp_path_factory.mktemp("wheels")
    members = [
        path.parent for group in ("core", "builtin_*/*", "plugins/*") for path in ROOT.glob(f"{group}/pyproject.toml")
    ]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*command, *members], check=True)
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the core's wheel and what it depends on."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.pip("install", "-q", str(wheels["specdec-core"]))
    return environment


@pytest.fixture(scope="module")
def model(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint, made with the installed test kit."""
    folder = tmp_path_factory.mktemp("model")
    environment.run("-c", MAKE_MODEL, str(folder))
    return folder


def test_wheels_hold_the_licence_and_the_type_marker(wheels: dict[str, Path]) -> None:
    from zipfile import ZipFile

    for wheel in wheels.values():
        names = ZipFile(wheel).namelist()
        assert any(name.endswith("licenses/LICENSE") for name in names), wheel.name
        assert any(name.endswith("py.typed") for name in names), wheel.name
        assert not any("tests/" in name for name in names), wheel.name


def test_the_core_alone_then_with_a_method_then_without_it(
    environment: Environment, wheels: dict[str, Path], model: Path
) -> None:
    """One environment through the life of a plugin: installing torch once is what takes the time."""
    ngram: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 3, "speculation": "always"}

    plain = json.loads(environment.generate(model).stdout)
    assert len(plain["tokens"]) == 40
    assert plain["drafts"] == 0
    assert set(environment.plugins().values()) == {"specdec-core"}
    _assert_is_missing(environment, model, ngram)

    environment.pip("install", "-q", "--no-deps", str(wheels["specdec-ngram"]))
    assert environment.plugins()["ngram"] == "specdec-ngram"
    drafted = json.loads(environment.generate(model, ngram).stdout)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["drafts"] > 0

    environment.pip("uninstall", "-q", "-y", "specdec-ngram")
    assert "ngram" not in environment.plugins()
    _assert_is_missing(environment, model, ngram)
    assert json.loads(environment.generate(model).stdout) == plain


def _assert_is_missing(environment: Environment, model: Path, method: dict[str, object]) -> None:
    told = "No proposer named 'ngram' is installed: pip install specdec-ngram. Installed proposers: none."
    refused = environment.generate(model, method, check=False)
    assert refused.returncode != 0
    assert told in refused.stderr
    arguments: Sequence[str] = ("--model", str(model), "--speculative-config", json.dumps(method), "hello")
    refused = environment.specdec("generate", *arguments, check=False)
    assert (refused.returncode, refused.stderr) == (2, f"error: {told}\n")


def test_every_plugin_loads_beside_the_core(environment: Environment, wheels: dict[str, Path]) -> None:
    environment.pip("install", "-q", *map(str, wheels.values()))
    environment.run("-m", "pip", "check")
    listed = json.loads(environment.specdec("plugins", "--load", "--json").stdout)
    usable = {entry["name"]: entry["status"] for entry in listed}
    usable.pop("triton")  # depends on the machine; that it loads is what the hooks say
    assert set(usable.values()) == {"ok"}
    assert all(entry["hooks"] for entry in listed if entry["name"] == "triton")
    assert {entry["distribution"] for entry in listed} == set(wheels)
