"""`specdec train` from prompts to a checkpoint that the engine drafts with, on a tiny target."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.cli.main import main
from specdec.testing import tiny_model
from specdec.testing.heads import tiny_head
from specdec_train.answers import feature_layers
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


def train(head: str, target: Path, prompts: Path, out: Path, *more: str, draft_vocab_size: int | None = 200) -> int:
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
    if draft_vocab_size is not None:
        words += ["--draft-vocab-size", str(draft_vocab_size)]
    return main([*words, "--held-out", "0.25", "--inner-dim", "16", *more])


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


def test_an_interrupted_run_goes_on_to_the_same_end(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again with more epochs, the answers are not made anew and the updates go on counting."""
    assert train("medusa", target, prompts, tmp_path, "--epochs", "1") == 0
    first = read_progress(tmp_path)[-1].update
    assert f"{first} of {first} updates: held-out loss" in capsys.readouterr().err
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "answers").glob("*.safetensors")}
    assert train("medusa", target, prompts, tmp_path, "--epochs", "3") == 0
    assert read_progress(tmp_path)[-1].update > first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "answers").glob("*.safetensors")} == shards


@pytest.mark.parametrize("head", HEADS)
def test_training_starts_from_a_given_head(head: str, target: Path, prompts: Path, tmp_path: Path) -> None:
    """With next to no learning the head that comes out is the one that went in, in another layout's names too."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(head, target, prompts, first) == 0
    given = first / "checkpoint"
    trained = load_file(given / "model.safetensors")
    rename(given / "model.safetensors", {"midlayer.": "layers.0.", "emb.": "speculator.emb.", "fc.": "model.fc."})
    short = ("--epochs", "0.01", "--learning-rate", "1e-9", "--num-prompts", "6")
    assert train(head, target, prompts, second, *short, "--init", str(given), draft_vocab_size=None) == 0
    again = load_file(second / "checkpoint" / "model.safetensors")
    assert again.keys() == trained.keys()
    assert all(torch.allclose(again[name].float(), trained[name].float(), atol=1e-6) for name in trained)


def test_an_output_linear_of_its_own_stays_the_heads(target: Path, prompts: Path, tmp_path: Path) -> None:
    given = tiny_head("eagle3", target, tmp_path / "given")
    path = given / "config.json"
    boundaries = [layer + 1 for layer in feature_layers(6)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_aux_hidden_state_layer_ids": boundaries}))
    out = tmp_path / "out"
    assert train("eagle3", target, prompts, out, "--init", str(given), "--epochs", "1", draft_vocab_size=None) == 0
    stored, trained = (load_file(folder / "model.safetensors") for folder in (given, out / "checkpoint"))
    assert torch.equal(stored["lm_head.weight"], trained["lm_head.weight"])
    assert torch.equal(stored["d2t"], trained["d2t"])
    assert not torch.equal(stored["fc.weight"].bfloat16(), trained["fc.weight"])
    assert train("eagle3", target, prompts, out, "--epochs", "2", draft_vocab_size=None) == 2, "without --init"


def test_another_draft_vocabulary_is_chosen_for_a_head_without_an_output_linear(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Of the size asked for, with the weights kept; without the option it stays what it was."""
    first, wider, same = (tmp_path / name for name in ("first", "wider", "same"))
    assert train("eagle3", target, prompts, first, draft_vocab_size=40) == 0
    short = ("--init", str(first / "checkpoint"), "--epochs", "0.01", "--learning-rate", "1e-9")
    assert train("eagle3", target, prompts, wider, *short, draft_vocab_size=100) == 0
    assert train("eagle3", target, prompts, same, *short, draft_vocab_size=None) == 0
    before, after, kept = (load_file(run / "checkpoint" / "model.safetensors") for run in (first, wider, same))
    assert (len(before["d2t"]), len(after["d2t"]), int(after["t2d"].sum())) == (40, 100, 100)
    assert torch.equal(kept["d2t"], before["d2t"])
    assert torch.allclose(after["fc.weight"].float(), before["fc.weight"].float(), atol=1e-6)


def test_training_goes_on_with_a_heads_own_number_of_attention_heads(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """More heads than the target's layers have: an EAGLE-3 head says its own."""
    given, out = tmp_path / "given", tmp_path / "out"
    first = tiny_head("eagle3", target, given)
    config = json.loads((first / "config.json").read_text())
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    wider = {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * groups}
    layers = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in feature_layers(6)]}
    (first / "config.json").write_text(json.dumps(config | wider | layers))
    tensors = load_file(first / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        key = next(key for key in tensors if key.endswith(f"{name}.weight"))
        tensors[key] = tensors[key].repeat((1, 2) if name == "o_proj" else (2, 1))
    save_file(tensors, first / "model.safetensors")
    assert train("eagle3", target, prompts, out, "--init", str(first), "--epochs", "1", draft_vocab_size=None) == 0
    trained = json.loads((out / "checkpoint" / "config.json").read_text())
    assert (trained["num_attention_heads"], trained["head_dim"]) == (2 * heads, size)
    speculative = {"method": "eagle3", "model": str(out / "checkpoint"), "speculation": "always"}
    with LLM(
        str(target), dtype="float32", kv_cache_memory="8MiB", max_model_len=128, speculative_config=speculative
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert (llm.stats().num_drafts > 0, llm.stats().num_proposer_faults) == (True, 0)


def rename(file: Path, names: dict[str, str]) -> None:
    """Replace the beginnings of tensors' names."""
    renamed = {}
    for name, tensor in load_file(file).items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, file)


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"intermediate_size": 40}, (), r"intermediate_size 40 instead of \d+"),
        ({"norm_before_residual": True}, (), "norm_before_residual True, which is not trained here"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (), r"\[1, 2, 3\] instead of \["),
        ({}, ("--draft-vocab-size", "100"), "--draft-vocab-size is 100, but .* drafts 256 tokens"),
        (None, (), r"fc.weight \[64, 32\] instead of \[\d+, \d+\]"),
    ],
)
def test_another_head_to_start_from_is_refused(
    change: dict[str, object] | None,
    more: tuple[str, ...],
    said: str,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = tiny_head("eagle3", target, tmp_path / "given")
    file = given / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (change or {})))
    if change is None:
        tensors = load_file(given / "model.safetensors")
        save_file(tensors | {"fc.weight": torch.zeros(64, 32)}, given / "model.safetensors")
    assert train("eagle3", target, prompts, tmp_path / "out", "--init", str(given), *more, draft_vocab_size=None) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()


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


def test_heads_learn_from_the_same_answers(target: Path, prompts: Path, tmp_path: Path) -> None:
    shared = tmp_path / "answers"
    for head in ("medusa", "eagle"):
        assert train(head, target, prompts, tmp_path / head, "--answers", str(shared)) == 0
        assert not (tmp_path / head / "answers").exists()
        assert (tmp_path / head / "checkpoint" / "model.safetensors").exists()
    manifest = (shared / "manifest.jsonl").read_text().splitlines()
    assert len(manifest) == 1 + len(PROMPTS)


def test_prompts_get_the_chat_template(target: Path, prompts: Path, tmp_path: Path) -> None:
    lengths = {}
    for name, flags in {"text": [], "chat": ["--chat"]}.items():
        assert train("medusa", target, prompts, tmp_path / name, "--num-prompts", "4", *flags) == 0
        records = (tmp_path / name / "answers" / "manifest.jsonl").read_text().splitlines()[1:]
        lengths[name] = [json.loads(record)["num_prompt_tokens"] for record in records]
    assert all(chat > text for chat, text in zip(lengths["chat"], lengths["text"], strict=True))


def test_answers_that_end_at_once_say_that_a_template_may_be_missing(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("medusa", target, prompts, tmp_path, "--max-tokens", "3") == 2
    assert "only 0 of 8 answers have 5 tokens or more" in capsys.readouterr().err
