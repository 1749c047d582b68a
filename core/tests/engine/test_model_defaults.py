"""Sampling as a checkpoint's generation_config.json has it, where a request says nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.cli.main import main
from specdec.testing import tiny_model

AUTHORS: dict[str, Any] = {"do_sample": True, "temperature": 0.3, "top_p": 0.8, "top_k": 3, "repetition_penalty": 1.5}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "1MiB", "stat_loggers": ()}
PROMPT = {"prompt_token_ids": [5, 6, 7]}
EXPECTED = SamplingParams(temperature=0.3, top_p=0.8, top_k=3, repetition_penalty=1.5)


def _model(folder: Path, **settings: Any) -> str:
    path = tiny_model("llama", folder, vocab_size=128, eos_token_id=None)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _model(tmp_path_factory.mktemp("models") / "llama", **AUTHORS)


def _tokens(llm: LLM, params: SamplingParams | None) -> list[int]:
    return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_no_parameters_are_the_models(model: str) -> None:
    with LLM(model, **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == EXPECTED
        seeded = attrs.evolve(EXPECTED, seed=7)
        assert _tokens(llm, seeded) != _tokens(llm, SamplingParams(seed=7)), "they do differ"
    texts = []
    for params in (None, EXPECTED):  # a new engine begins with the same seeds
        with LLM(model, **SETTINGS) as llm:
            texts.append(_tokens(llm, params))
    assert texts[0] == texts[1]


def test_they_can_be_ignored(model: str) -> None:
    with LLM(model, generation_config="none", **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    llm = AsyncLLM(model, generation_config="none", **SETTINGS)
    try:
        assert llm.get_default_sampling_params() == SamplingParams()
    finally:
        llm.close()


def test_what_is_not_allowed_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(tmp_path / "llama", top_k=5, repetition_penalty=-1.0)
    with caplog.at_level(logging.WARNING), LLM(model, **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    assert "repetition_penalty is -1.0" in caplog.text


@pytest.mark.parametrize(
    ("typed", "same_as"),
    [
        ([], EXPECTED),
        (["--temperature", "0.9"], attrs.evolve(EXPECTED, temperature=0.9)),
        (["--generation-config", "none"], SamplingParams()),
    ],
)
def test_the_command_fills_in_what_was_not_typed(
    model: str, typed: list[str], same_as: SamplingParams, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPT))
    command = ["generate", "--model", model, "--prompts", str(prompts), "--json", "--sampling.seed", "7", *typed]
    assert main([*command, "--dtype", "float32", "--kv-cache-memory", "1MiB", "--max-model-len", "64"]) == 0
    found = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
    with LLM(model, **SETTINGS) as llm:
        assert found == _tokens(llm, attrs.evolve(same_as, seed=7))
