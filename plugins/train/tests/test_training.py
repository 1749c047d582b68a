"""`specdec train` from prompts to a checkpoint that the engine drafts with, on a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec import LLM, SamplingParams
from specdec.cli.main import main
from specdec.testing import tiny_model
from specdec_train.loop import read_progress

PROMPTS = [
    "one two three",
    "alpha beta",
    "a b c d e f",
    "hello there",
    "what is this",
    "more of it",
    "last but one",
    "end",
]
HEADS = ["eagle3", "eagle", "medusa", "mlp_speculator"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def train(head: str, target: Path, prompts: Path, out: Path, *more: str) -> int:
    words = [
        "train",
        head,
        "--model",
        str(target),
        "--prompts",
        str(prompts),
        "--output",
        str(out),
        "--dtype",
        "float32",
    ]
    words += ["--max-tokens", "24", "--epochs", "4", "--tokens-per-update", "64", "--num-steps", "3"]
    return main([*words, "--draft-vocab-size", "200", "--held-out", "0.25", "--inner-dim", "16", *more])


@pytest.mark.parametrize("head", HEADS)
def test_a_trained_head_drafts_and_changes_nothing(head: str, target: Path, prompts: Path, tmp_path: Path) -> None:
    assert train(head, target, prompts, tmp_path) == 0
    assert (tmp_path / "progress.png").stat().st_size > 1000
    checkpoint = tmp_path / "checkpoint"
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())
    sampling = SamplingParams(temperature=0, max_tokens=16)
    with LLM(str(target), dtype="float32", kv_cache_memory="8MiB", max_model_len=128) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    speculative = {"method": head, "model": str(checkpoint), "num_speculative_tokens": 3, "speculation": "always"}
    with LLM(
        str(target), dtype="float32", kv_cache_memory="8MiB", max_model_len=128, speculative_config=speculative
    ) as llm:
        drafted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
        stats = llm.stats()
    assert drafted == plain
    assert stats.num_drafts > 0
    assert stats.num_proposer_faults == 0


def test_a_head_learns_what_it_is_shown(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Trained long on few answers, the head must draft them; a wrong layer, position or shift is caught here."""
    assert (
        train("eagle3", target, prompts, tmp_path, "--epochs", "60", "--learning-rate", "0.01", "--held-out", "0.01")
        == 0
    )
    speculative = {
        "method": "eagle3",
        "model": str(tmp_path / "checkpoint"),
        "num_speculative_tokens": 3,
        "speculation": "always",
    }
    sampling = SamplingParams(temperature=0, max_tokens=24)
    with LLM(
        str(target), dtype="float32", kv_cache_memory="8MiB", max_model_len=128, speculative_config=speculative
    ) as llm:
        llm.generate(PROMPTS, sampling, use_tqdm=False)
        assert llm.stats().mean_acceptance_length > 2.0


def test_an_interrupted_run_goes_on_to_the_same_end(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Started again with more epochs, the answers are not made anew and the updates go on counting."""
    assert train("medusa", target, prompts, tmp_path, "--epochs", "1") == 0
    first = read_progress(tmp_path)[-1].update
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "answers").glob("*.safetensors")}
    assert train("medusa", target, prompts, tmp_path, "--epochs", "3") == 0
    assert read_progress(tmp_path)[-1].update > first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "answers").glob("*.safetensors")} == shards


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--epochs", "0"), "--epochs is 0.0, but must be above 0"),
        (("--num-steps", "99"), "--num-steps is 99, but must be from 1 to 16"),
        (("--prompts", "nowhere.jsonl"), "there is no file 'nowhere.jsonl'"),
        (("--max-tokens", "2"), "answers have the 5 tokens that 3 draft steps need"),
    ],
)
def test_mistakes_are_named(
    more: tuple[str, ...],
    said: str,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("eagle3", target, prompts, tmp_path, *more) == 2
    assert said in capsys.readouterr().err
