"""Every token's states are written once, and are those of a plain forward pass."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.cli.main import main
from specdec.errors import ConfigError, InvalidRequestError, PluginUnsuitableError
from specdec.registry import Registry
from specdec.testing import tiny_model
from specdec_extract_hidden_states.shards import MANIFEST, read_manifest, read_request

torch.set_num_threads(1)
LAYERS = (0, 1)
PROMPTS = [
    [int(t) for t in torch.randint(2, 100, (n,), generator=torch.Generator().manual_seed(n))] for n in (5, 40, 1, 23)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=128, eos_token_id=None))


def open_llm(model: str, folder: Path, method: dict[str, Any] | None = None, **settings: Any) -> LLM:
    options = {"layers": list(LAYERS), "hidden_states_dtype": "float32", "output_path": str(folder)} | (method or {})
    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "kv_cache_memory": "1MiB",
        "enable_prefix_caching": False,
        "stat_loggers": (),
    } | settings
    return LLM(model, speculative_config={"method": "extract_hidden_states", **options}, **settings)


def params(record_id: str | None = None, max_tokens: int = 6) -> SamplingParams:
    extra_args = {} if record_id is None else {"hidden_states_id": record_id}
    return SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra_args)


def run(llm: LLM, prompts: list[list[int]], max_tokens: int = 6) -> None:
    named = [params(f"p{i}", max_tokens) for i in range(len(prompts))]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], named, use_tqdm=False)


@torch.inference_mode()
def reference(model: str, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Hidden states of a plain forward pass over the whole text."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[str, torch.Tensor] = {}
    for layer in LAYERS:
        module.model.layers[layer].register_forward_hook(
            lambda _m, _a, output, layer=layer: found.update(
                {f"layer_{layer}": (output[0] if isinstance(output, tuple) else output).reshape(len(token_ids), -1)}
            )
        )
    found["final"] = module.model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
    return found


def check_all(model: str, folder: Path, prompts: list[list[int]], num_output: int = 6) -> None:
    """Each prompt is there once, whole, with the states of a plain forward pass."""
    records = {record["id"]: record for record in read_manifest(folder)[1]}
    assert len(read_manifest(folder)[1]) == len(records) == len(prompts)
    for i, prompt in enumerate(prompts):
        record = records[f"p{i}"]
        tensors = read_request(folder, record)
        tokens = tensors.pop("token_ids")
        assert tokens[: len(prompt)].tolist() == prompt
        assert len(tokens) == len(prompt) + num_output == record["num_tokens"]
        assert record["num_prompt_tokens"] == len(prompt)
        expected = reference(model, tokens[:-1])
        assert tensors.keys() == expected.keys()
        for name, states in tensors.items():
            torch.testing.assert_close(states, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"max_num_seqs": 1},
    ],
)
def test_equals_a_plain_forward_pass(model: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    """At once, in prefill chunks of a few tokens, and one at a time."""
    with open_llm(model, tmp_path, **settings) as llm:
        run(llm, PROMPTS)
        assert llm.stats().spec.num_draft_tokens == 0
        assert llm.stats().num_proposer_faults == 0
    check_all(model, tmp_path, PROMPTS)


def test_preempted_requests(model: str, tmp_path: Path) -> None:
    """Positions that are computed again after a preemption are written once."""
    prompts = [[*range(2, 62)], [*range(30, 90)], [*range(60, 120)]]
    with open_llm(model, tmp_path, max_model_len=100, kv_cache_memory="64KiB", block_size=4) as llm:
        run(llm, prompts, max_tokens=30)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_proposer_faults == 0
    check_all(model, tmp_path, prompts, 30)


def test_shards_are_bounded(model: str, tmp_path: Path) -> None:
    """A small shard size gives a shard for each request; the types are those asked for."""
    with open_llm(model, tmp_path, {"shard_size": 1, "hidden_states_dtype": "bfloat16", "layers": [1]}) as llm:
        run(llm, PROMPTS)
        assert sorted(p.name for p in tmp_path.glob("shard-*")) == [f"shard-{i:05}.safetensors" for i in range(4)]
        assert sum(llm._engine.core._drafting.proposer.memory().values()) == 0  # type: ignore[union-attr]
    header, records = read_manifest(tmp_path)
    assert header["layers"] == [1]
    tensors = read_request(tmp_path, records[0])
    assert set(tensors) == {"token_ids", "layer_1", "final"}
    assert tensors["layer_1"].dtype == torch.bfloat16


def test_a_cached_prefix_is_told(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """States of cached tokens are not computed: the request is left out, with what to set."""
    with open_llm(model, tmp_path, enable_prefix_caching=True, block_size=4) as llm:
        run(llm, PROMPTS[1:2])
        with caplog.at_level(logging.WARNING):
            llm.generate({"prompt_token_ids": PROMPTS[1]}, params("again"), use_tqdm=False)
        assert llm.stats().proposer["left_out_requests"] == 1
    assert "enable_prefix_caching to false" in caplog.text
    check_all(model, tmp_path, PROMPTS[1:2])


def test_resumes(model: str, tmp_path: Path) -> None:
    """What is in the manifest is not written again; a line that a crash cut, and its shard, are."""
    with open_llm(model, tmp_path, {"shard_size": 1}) as llm:
        run(llm, PROMPTS)
    manifest = tmp_path / MANIFEST
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:3]) + lines[3][:20])
    with open_llm(model, tmp_path, {"shard_size": 1}) as llm:
        run(llm, PROMPTS)
    check_all(model, tmp_path, PROMPTS)
    assert [json.loads(line) for line in manifest.read_text().splitlines()[:3]] == [
        json.loads(line) for line in lines[:3]
    ]


@pytest.mark.parametrize("kept", [0, 10])
def test_a_crash_before_the_first_line_was_whole(model: str, tmp_path: Path, kept: int) -> None:
    """The directory begins anew, header first."""
    with open_llm(model, tmp_path):
        pass
    manifest = tmp_path / MANIFEST
    header = manifest.read_text()
    manifest.write_text(header[:kept])
    with open_llm(model, tmp_path) as llm:
        run(llm, PROMPTS[:1])
    assert manifest.read_text().startswith(header)
    check_all(model, tmp_path, PROMPTS[:1])


def test_other_settings_in_the_same_directory(model: str, tmp_path: Path) -> None:
    with open_llm(model, tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"layers \[0, 1\], now \[1\]"):
        open_llm(model, tmp_path, {"layers": [1]})


def test_wrong_options(model: str, tmp_path: Path) -> None:
    """Each refusal says what is wrong and what would be right."""
    options = Registry().plugin_config
    with pytest.raises(ConfigError, match=r"speculative\.output_path"):
        options("proposer", "extract_hidden_states", {})
    with pytest.raises(ConfigError, match="nothing to write"):
        options("proposer", "extract_hidden_states", {"output_path": "x", "final_hidden_states": False})
    with pytest.raises(ConfigError, match="different layer numbers"):
        options("proposer", "extract_hidden_states", {"output_path": "x", "layers": [1, 1]})
    with pytest.raises(PluginUnsuitableError, match="has 7, but .* has layers 0 to"):
        open_llm(model, tmp_path, {"layers": [7]})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_path .* cannot be used"):
        open_llm(model, tmp_path / "file")
    with open_llm(model, tmp_path / "new") as llm, pytest.raises(InvalidRequestError, match="non-empty string"):
        llm.generate("a", SamplingParams(extra_args={"hidden_states_id": 3}), use_tqdm=False)


# --- the command --------------------------------------------------------------------------------


def command(model: str, prompts: Path, folder: Path, *more: str) -> int:
    fixed = ["--layers", "0,1", "--dtype", "float32", "--hidden-dtype", "float32", "--max-tokens", "6"]
    return main(["extract", model, "--prompts", str(prompts), "--output", str(folder), *fixed, *more])


def write_prompts(path: Path, prompts: list[list[int]]) -> Path:
    lines = [json.dumps({"id": f"p{i}", "prompt_token_ids": prompt}) for i, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All prompts are written; a second run finds nothing to do, a third only what is new."""
    folder = tmp_path / "states"
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS[:3])
    assert command(model, prompts, folder, "--batch-size", "2") == 0
    assert "3 prompts written" in capsys.readouterr().out
    check_all(model, folder, PROMPTS[:3])
    assert command(model, prompts, folder) == 0
    assert "3 of 3 prompts are written already" in capsys.readouterr().err
    assert command(model, write_prompts(prompts, PROMPTS), folder) == 0
    assert "1 prompts written" in capsys.readouterr().out
    check_all(model, folder, PROMPTS)


def test_command_refuses_equal_ids(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    assert command(model, tmp_path / "prompts.jsonl", tmp_path / "states") != 0
    assert "two prompts have the id 'a'" in capsys.readouterr().err
