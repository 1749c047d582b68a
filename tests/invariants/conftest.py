"""One tiny random llama for all invariant tests: it draws uncommon tokens, which finds faults in stops and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specdec import LLM, RequestOutput, SamplingParams
from specdec.drafting import Proposer
from specdec.testing import tiny_model, use_proposer
from tests.invariants.kit import (
    MAX_LEN,
    METHODS,
    VOCAB,
    Baseline,
    Runs,
    Start,
    method_settings,
    proposer_named,
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the tiny model; its end-of-text token is 1, as its tokenizer says."""
    path = tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", vocab_size=VOCAB, eos_token_id=None)
    return str(path)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with the same tokenizer and other weights, for methods that need a second one."""
    path = tiny_model(
        "qwen2", tmp_path_factory.mktemp("models") / "qwen2", vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=1
    )
    return str(path)


@pytest.fixture
def start(model: str) -> Iterator[Start]:
    """Start engines with small limits; they are closed, and their blocks counted (I8), when the test ends."""
    engines: list[LLM] = []

    def start_engine(proposer: Proposer | None = None, k: int = 4, **settings: Any) -> LLM:
        settings = {
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            "kv_cache_memory": "4MiB",
            "stat_loggers": (),
            "proposer_time_budget": 0,
            "model": model,
        } | settings
        if proposer is not None:
            settings = use_proposer(proposer, k) | settings
        engine = LLM(**settings)
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks, "blocks leaked (I8)"
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
        engine.close()


@pytest.fixture(scope="session")
def baseline(model: str) -> Iterator[Baseline]:
    """Outputs of plain decoding, one request at a time, for prompts and parameters (kept between tests)."""
    engine = LLM(model, dtype="float32", max_model_len=MAX_LEN, kv_cache_memory="4MiB", stat_loggers=())
    known: dict[str, RequestOutput] = {}

    def outputs(prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        found = []
        for prompt, one in zip(prompts, each, strict=True):
            key = f"{prompt} {one!r}"
            if key not in known:
                engine.reset_prefix_cache()
                known[key] = engine.generate(prompt, one, use_tqdm=False)[0]
            found.append(known[key])
        return found

    yield outputs
    engine.close()


@pytest.fixture(scope="session")
def runs(baseline: Baseline) -> Runs:
    """Prompt and plain greedy output in one list per prompt, as oracle proposers take them."""

    def made(prompts: list[list[int]], max_tokens: int = 48) -> list[list[int]]:
        plain = baseline(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
        return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, plain, strict=True)]

    return made


@pytest.fixture
def speculation(
    request: pytest.FixtureRequest, model: str, other_model: str, runs: Runs
) -> Callable[[int], dict[str, Any]]:
    """Settings of an engine that speculates with the oracle or method of that name; see `speculating`."""
    name: str = request.param

    def settings(k: int) -> dict[str, Any]:
        if name in METHODS:
            return method_settings(name, k, model, other_model)
        return {"proposer": proposer_named(name, model, runs), "k": k}

    return settings
