"""Mistakes on the command line of ``specdec train``: one message, before the target is loaded."""

import json
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.testing import tiny_model


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps("hello") + "\n")
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", "medusa", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_prompts(number: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "m", "--prompts", str(prompts), "--output", str(tmp_path / "out"), "--num-prompts", number]
    assert refused(capsys, *words) == f"error: --num-prompts is {number}, but must be at least 1\n"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_where_the_folder_should_be(
    below: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_model("llama", tmp_path / "target", num_hidden_layers=3)
    taken = tmp_path / "taken"
    taken.touch()
    words = ["--model", str(target), "--prompts", str(prompts), "--output", str(taken / below)]
    assert refused(capsys, *words).startswith(f"error: --output: '{taken / below}' cannot be used: ")


def test_a_target_with_too_few_layers(
    shallow: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(shallow), "--prompts", str(prompts), "--output", str(tmp_path / "out")]
    assert refused(capsys, *words) == "error: --model: the target has 2 layers; a head needs 3 or more\n"
    assert not (tmp_path / "out").exists()


def test_a_type_that_does_not_exist(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "m", "--prompts", str(prompts), "--output", str(tmp_path / "out"), "--dtype", "bfloat26"]
    assert (
        "dtype = 'bfloat26': must be 'auto', 'float32', 'bfloat16' or 'float16'. Did you mean 'bfloat16'?"
        in refused(capsys, *words)
    )
