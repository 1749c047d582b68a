"""`specdec new-plugin`: what it makes passes its own tests and its contract; mistakes are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.cli.new_plugin import kinds

NAMES = {"head": "eagle.weather_vane"}
"""Entry points whose name is not that of the plugin."""


def _run(*arguments: str | Path, path: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run([sys.executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution of each kind, one folder each."""
    folder = tmp_path_factory.mktemp("made")
    for kind in kinds():
        arguments = ["new-plugin", kind, "weather-vane", "--path", str(folder / kind), "--author", "A. B. <a@b.org>"]
        assert main(arguments) == 0
    return folder


def _installed(source: Path, folder: Path) -> Path:
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target")
    done = _run(*pip, folder, source, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder


def test_there_is_a_template_for_each_kind_that_authors_write() -> None:
    expected = ["attention-backend", "grammar", "head", "logits-processor", "proposer", "stat-logger", "verifier"]
    assert kinds() == expected


@pytest.mark.parametrize("kind", kinds())
def test_files_and_metadata(made: Path, kind: str) -> None:
    folder = made / kind / "specdec-weather-vane"
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    assert settings["project"]["name"] == "specdec-weather-vane"
    assert settings["project"]["authors"] == [{"name": "A. B.", "email": "a@b.org"}]
    (entries,) = settings["project"]["entry-points"].values()
    assert entries == {NAMES.get(kind, "weather_vane"): "specdec_weather_vane.plugin"}
    source = folder / "src/specdec_weather_vane"
    assert {"__init__.py", "plugin.py", "py.typed"} <= {path.name for path in source.iterdir()}
    assert "Apache License" in (folder / "LICENSE").read_text()
    left = [path.name for path in folder.rglob("*") if path.is_file() and "$" in path.read_text().replace("$ ", "")]
    assert not left, "placeholders are left"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "proposer" else pytest.mark.slow) for kind in kinds()]
)
def test_its_tests_and_its_check_pass(made: Path, tmp_path: Path, kind: str) -> None:
    source = made / kind / "specdec-weather-vane"
    path = _installed(source, tmp_path / "site")
    done = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", path=path, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    options: list[str] = []
    if kind == "head":
        checkpoint = tmp_path / "checkpoint"
        _run("-m", "specdec_weather_vane.random_checkpoint", checkpoint, path=path, cwd=tmp_path)
        options = ["--options", json.dumps({"model": str(checkpoint)})]
    check = ["-m", "specdec.cli.main", "plugins", "check", NAMES.get(kind, "weather_vane"), "--json", *options]
    done = _run(*check, path=path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert all(check["seconds"] >= 0 for check in report["checks"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_linters_have_nothing_to_say(made: Path, kind: str) -> None:
    source = made / kind / "specdec-weather-vane"
    for command in (["ruff", "check", "."], ["mypy", "--strict", "src", "tests"]):
        environ = {**os.environ, "MYPYPATH": "src"}
        tool = Path(sys.executable).parent / command[0]
        done = subprocess.run([tool, *command[1:]], cwd=source, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["proposer", "specdec-echo"], "leave out 'specdec-', which is put before it: echo"),
        (["proposer", "My Echo"], "at most 40 characters. For example: my-echo"),
        (["proposer", "1echo"], "must be lower-case words"),
        (["proposer", "a" * 41], "at most 40 characters"),
        (["proposer", "ngram"], "specdec-ngram is a package of specdec itself"),
        (["verifier", "match"], "the verifier 'match' is installed already, by specdec-core"),
        (["verifier", "x", "--target", "llama"], "only a head is made for one architecture"),
        (["proposer", "x", "--author", "<a@b.org>"], "must be 'Name' or 'Name <address@host>'"),
        (["propeller", "x"], "KIND = 'propeller': must be 'attention-backend', 'grammar'"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", *arguments, "--path", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["new-plugin", "proposer", "weather-vane", "--path", str(tmp_path)]
    assert main(arguments) == 0
    assert "specdec plugins check weather_vane" in capsys.readouterr().out
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    assert "exists; nothing was written" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.isolation
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_installation(made: Path, tmp_path: Path) -> None:
    """Editable, into an environment of its own that sees this one's packages."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in outer))
    source = made / "proposer/specdec-weather-vane"
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", source]
    subprocess.run(pip, check=True)
    check = [python, "-m", "specdec.cli.main", "plugins", "check", "weather_vane"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
