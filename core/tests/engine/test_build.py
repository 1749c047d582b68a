"""Putting an engine together."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import from_kwargs
from specdec.engine.build import build
from specdec.registry import Registry
from specdec.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


def test_factories_can_build_other_plugins_of_the_same_engine(model: Path) -> None:
    """The context carries the engine's registry, with the engine's restrictions."""
    config = from_kwargs(
        model, kv_cache_memory="1MiB", max_model_len=64, stat_loggers=(), plugins={"block": ["suffix"]}
    )
    context = build(config).context
    assert isinstance(context.registry, Registry)
    assert context.registry.create("verifier", "match", "verify", config={}, engine=context).name == "match"
    blocked = [entry.name for entry in context.registry.entries() if entry.status == "blocked"]
    assert set(blocked) <= {"suffix"}
