"""Tiny models, and engines that draft with one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM
from specdec.testing import tiny_model

VOCAB = 128


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def target(folder: Path) -> str:
    """A llama of two layers without an end token."""
    return str(tiny_model("llama", folder / "target", vocab_size=VOCAB, eos_token_id=None))


@pytest.fixture(scope="session")
def other(folder: Path) -> str:
    """A qwen2 of one layer with the target's tokenizer."""
    return str(tiny_model("qwen2", folder / "other", vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=1, seed=5))


@pytest.fixture
def start(target: str) -> Iterator[Callable[..., LLM]]:
    """Start engines; ``draft`` names the drafter, and options of the method come as ``options``."""
    engines: list[LLM] = []

    def start_engine(
        draft: str | None = None, k: int = 4, options: dict[str, Any] | None = None, **settings: Any
    ) -> LLM:
        settings = {
            "model": target,
            "dtype": "float32",
            "max_model_len": 192,
            "kv_cache_memory": "4MiB",
            "stat_loggers": (),
            "proposer_time_budget": 0,
        } | settings
        if draft is not None:
            settings["speculative_config"] = {
                "method": "draft_model",
                "model": draft,
                "num_speculative_tokens": k,
                "speculation": "always",
                **(options or {}),
            }
        engines.append(LLM(**settings))
        return engines[-1]

    yield start_engine
    for engine in engines:
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks, "blocks leaked"
        assert stats.num_proposer_faults == 0, "the proposer raised"
        engine.close()
