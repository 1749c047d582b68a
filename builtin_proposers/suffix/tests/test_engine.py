"""The method in an engine: lossless, faster the second time, and never a reason for a request to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LLM, RequestOutput, SamplingParams
from specdec.errors import InvalidRequestError
from specdec.testing import tiny_model
from specdec_suffix import persistence

torch.set_num_threads(1)
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(2, 100, n)] for n in (5, 30, 1, 17)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=128, eos_token_id=None))


def open_llm(model: str, options: dict[str, Any] | None = None) -> LLM:
    method = (
        None
        if options is None
        else {"method": "suffix", "num_speculative_tokens": 6, "speculation": "always", **options}
    )
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": "2MiB", "stat_loggers": ()}
    return LLM(model, speculative_config=method, **settings)


def run(llm: LLM, temperature: float = 0, **extra_args: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, extra_args=extra_args)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.spec_stats.num_accepted_tokens for output in outputs if output.spec_stats is not None)


@pytest.mark.parametrize("options", [{}, {"suffix_trees": True, "suffix_decoding_max_spec_factor": 4.0}])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_second_time_is_faster_and_the_same(model: str, options: dict[str, Any], temperature: float) -> None:
    """Outputs are the plain ones; asked again, most tokens come from the first responses."""
    with open_llm(model) as plain:
        expected = ids(run(plain, temperature))
    with open_llm(model, options) as llm:
        first, second = run(llm, temperature), run(llm, temperature)
        assert llm.stats().num_proposer_faults == 0
        assert llm.stats().proposer["stored_responses"] == 2 * len(PROMPTS)
    assert ids(first) == ids(second) == expected
    assert accepted(second) > 0.6 * sum(map(len, expected))


def test_scopes_and_opting_out(model: str) -> None:
    """What one tenant's requests leave does not speed up another's; nothing is left by those that say so."""
    with open_llm(model, {}) as llm:
        alone = accepted(run(llm, suffix_store=False))
        assert accepted(run(llm, suffix_store=False)) == alone
        run(llm, suffix_scope="tenant-a")
        assert accepted(run(llm, suffix_scope="tenant-b", suffix_store=False)) == alone
        assert accepted(run(llm, suffix_store=False)) == alone
        assert accepted(run(llm, suffix_scope="tenant-a")) > alone + 40


def test_wrong_request_options_are_refused(model: str) -> None:
    """Before anything runs, naming the key; a key that nobody reads is refused too."""
    with open_llm(model, {}) as llm:
        with pytest.raises(InvalidRequestError, match=r"extra_args\['suffix_scope'\] is 7"):
            run(llm, suffix_scope=7)
        with pytest.raises(InvalidRequestError, match=r"suffix_scop\b.*suffix_scope, suffix_store"):
            run(llm, suffix_scop="a")
        assert llm.stats().num_steps == 0
    with open_llm(model) as plain, pytest.raises(InvalidRequestError, match="suffix_scope"):
        run(plain, suffix_scope="a")


def test_a_fault_in_persistence_loses_no_request(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever saving raises, outputs are whole; the engine counts faults."""
    with open_llm(model) as plain:
        expected = ids(run(plain))

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(persistence, "_write", fail)
    options = {"suffix_cache_path": str(tmp_path / "responses"), "suffix_save_interval": 1e-9}
    with open_llm(model, options) as llm:
        assert ids(run(llm)) == expected
        assert llm.stats().num_proposer_faults > 0
        assert llm.stats().proposer["stored_responses"] == len(PROMPTS)


def test_requests_without_drafts_are_stored_too(model: str) -> None:
    """The engine asks for no draft where one token is left, or while drafting is paused."""
    with open_llm(model, {}) as llm:
        llm.generate({"prompt_token_ids": PROMPTS[1]}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert llm.stats().proposer["stored_responses"] == 1


def test_responses_outlive_the_engine(model: str, tmp_path: Path) -> None:
    options = {"suffix_cache_path": str(tmp_path / "responses")}
    with open_llm(model, options) as llm:
        first = run(llm)
    with open_llm(model, options) as llm:
        again = run(llm)
    assert ids(again) == ids(first)
    assert accepted(again) > accepted(first)
