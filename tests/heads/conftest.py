"""A tiny target with enough layers to read from, and engines on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM
from specdec.testing import tiny_model

VOCAB, MAX_LEN = 128, 192


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny Llama of four layers without an end token."""
    path = tmp_path_factory.mktemp("heads") / "llama"
    return str(tiny_model("llama", path, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=4, hidden_size=32))


@pytest.fixture
def start(model: str) -> Iterator[Callable[..., LLM]]:
    """Start engines with small limits; they are closed, and their blocks counted, when the test ends."""
    engines: list[LLM] = []

    def start_engine(speculative: dict[str, Any] | None = None, target: str | Path = model, **settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            "kv_cache_memory": "4MiB",
            "stat_loggers": (),
            "proposer_time_budget": 0,
        }
        if speculative is not None:
            defaults["speculative_config"] = {"speculation": "always", **speculative}
        engines.append(LLM(str(target), **(defaults | settings)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks, "blocks leaked"
        assert stats.num_proposer_faults == 0
        engine.close()
