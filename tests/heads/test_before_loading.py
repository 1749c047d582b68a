"""What names, options and configuration files tell of a mistake is said before the target's weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.errors import SpecdecError
from specdec.testing import tiny_model
from specdec.testing.heads import tiny_head

Start = Callable[..., LLM]
LAYOUTS = ("eagle", "eagle3", "medusa", "mlp_speculator")


@pytest.fixture(scope="module")
def heads(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head of each layout, and those of a wider target with another vocabulary below ``other``."""
    folder = tmp_path_factory.mktemp("heads")
    for layout in LAYOUTS:
        tiny_head(layout, model, folder / layout)
    other = tiny_model("llama", folder / "wide", vocab_size=96, num_hidden_layers=4, hidden_size=48)
    for layout in LAYOUTS:
        tiny_head(layout, other, folder / "other" / layout)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr("specdec.target.model.load_model", read)
    monkeypatch.setattr("specdec.drafting.checkpoint._read", read)


def _refusal(start: Start, speculative: dict[str, Any] | None, **settings: Any) -> str:
    with pytest.raises(SpecdecError) as caught:
        start(speculative, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("speculative", "settings", "words"),
    [
        ({"method": "ngrm"}, {}, "No proposer named 'ngrm'"),
        ({"method": "ngram", "prompt_lookup_maxx": 3}, {}, "unknown setting 'speculative.prompt_lookup_maxx'"),
        (None, {"verifier": "mach"}, "No verifier named 'mach'"),
        (None, {"verifier_options": {"x": 1}}, "unknown setting 'verifier_options.x'"),
        (None, {"attention_backend": "spda"}, "No attention backend named 'spda'"),
        (None, {"sampling_backend": "troch"}, "No sampling backend named 'troch'"),
        (None, {"grammar_backend": "xgramar"}, "No grammar backend named 'xgramar'"),
        (None, {"logits_processors": ("nothing",)}, "No logits processor named 'nothing'"),
        (None, {"logits_processor_options": {"x": {}}}, "logits_processor_options has a table 'x'"),
        (None, {"stat_loggers": ("loging",)}, "No stat logger named 'loging'"),
        (None, {"max_model_len": 4096}, "has 2048 positions"),
        (None, {"kv_cache_memory": "900TiB"}, "more than this machine's memory"),
        ({"method": "extract_hidden_states", "output_path": "x", "layers": [7]}, {}, "has layers 0 to 3"),
    ],
)
def test_names_and_options(
    start: Start, speculative: dict[str, Any] | None, settings: dict[str, Any], words: str
) -> None:
    assert words in _refusal(start, speculative, **settings)


@pytest.mark.parametrize("method", [*LAYOUTS, "draft_model"])
@pytest.mark.parametrize(
    ("folder", "problem"), [("empty", "has no config.json"), ("nothing", "no file or directory"), ("", "has no config")]
)
def test_folders_that_are_no_checkpoints(start: Start, heads: Path, method: str, folder: str, problem: str) -> None:
    """The message begins with the setting that names the folder."""
    text = _refusal(start, {"method": method, "model": str(heads / folder)})
    assert text.startswith("speculative.model: ")
    assert problem in text


def test_without_a_method_too(start: Start, heads: Path) -> None:
    assert _refusal(start, {"model": str(heads / "empty")}).startswith("speculative.model: the directory")


def test_a_member_of_a_composite(start: Start, heads: Path) -> None:
    members = [{"method": "ngram"}, {"method": "eagle", "model": str(heads / "nothing")}]
    text = _refusal(start, {"method": "composite", "proposers": members})
    assert text.startswith("speculative.proposers[1].model: no file or directory")
    members[1]["model"] = str(heads / "medusa")
    text = _refusal(start, {"method": "composite", "proposers": members})
    assert text.startswith(f"speculative.proposers[1].model: {heads / 'medusa'} is not made for the method 'eagle'")


@pytest.mark.parametrize("method", [*LAYOUTS, "draft_model"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_another_method(start: Start, heads: Path, method: str, layout: str) -> None:
    if method == layout:
        return
    text = _refusal(start, {"method": method, "model": str(heads / layout)})
    assert text.startswith(f"speculative.model: {heads / layout} is not made for the method {method!r} but for ")
    assert f"set speculative.method to {layout!r}" in text


def test_a_whole_model_as_a_head(start: Start, heads: Path, model: str) -> None:
    assert "but for 'draft_model'" in _refusal(start, {"method": "eagle3", "model": model})


def test_a_gguf_file_as_a_head(start: Start, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    text = _refusal(start, {"method": "medusa", "model": str(tmp_path / "model.gguf")})
    assert text.startswith("speculative.model: ")
    assert "give the directory of a head" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_another_target(start: Start, heads: Path, layout: str) -> None:
    text = _refusal(start, {"method": layout, "model": str(heads / "other" / layout)})
    assert "hidden size 48 where the target has 32" in text
    if layout != "medusa":  # whose configuration does not say it
        assert "vocabulary 96 where the target has 128" in text
    assert "Set speculative.model to a head for this target" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_without_weights(start: Start, heads: Path, layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((heads / layout / "config.json").read_bytes())
    text = _refusal(start, {"method": layout, "model": str(tmp_path)})
    assert "holds no weights" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_as_the_target(start: Start, heads: Path, layout: str) -> None:
    name = str(heads / layout)
    text = _refusal(start, None, target=name)
    assert text.startswith(
        f"model: {name!r} is no whole language model but something that the method {layout!r} drafts"
    )
    assert f"speculative.model to {name!r}" in text


def test_heads_inside_their_target_are_no_obstacle(start: Start, model: str, tmp_path: Path) -> None:
    """A folder with Medusa heads beside the target's own tensors is both."""
    from safetensors.torch import load_file, save_file

    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 1}))
    tensors = load_file(Path(model) / "model.safetensors")
    inside = {"medusa_head.0.0.linear.weight": tensors["model.norm.weight"].clone()}
    save_file({**tensors, **inside}, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match="weights are read"):
        start(None, target=tmp_path)


def test_a_verifier_that_does_not_take_the_drafts(start: Start, heads: Path) -> None:
    options = {"method": "eagle3", "model": str(heads / "eagle3"), "tree_top_k": 2}
    text = _refusal(start, options, verifier="block")
    assert "drafts trees, which the verifier 'block' does not take" in text


@pytest.mark.parametrize(("layout", "most"), [("medusa", 4), ("mlp_speculator", 3)])
def test_more_draft_tokens_than_the_checkpoint_has_heads(start: Start, heads: Path, layout: str, most: int) -> None:
    text = _refusal(start, {"method": layout, "model": str(heads / layout), "num_speculative_tokens": most + 1})
    assert f"num_speculative_tokens is {most + 1}, but the proposer {layout!r}" in text
    assert f"drafts at most {most} tokens" in text


def test_what_is_right_gets_as_far_as_the_weights(start: Start, heads: Path) -> None:
    """What makes the other tests mean something."""
    for layout in LAYOUTS:
        with pytest.raises(AssertionError, match="weights are read"):
            start({"method": layout, "model": str(heads / layout)})
    with pytest.raises(AssertionError, match="weights are read"):
        start({"model": str(heads / "eagle3")})
