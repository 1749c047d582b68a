"""Putting an engine together."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.attention.sdpa import SdpaBackend
from specdec.config import from_kwargs
from specdec.engine.build import build
from specdec.errors import PluginUnsuitableError
from specdec.registry import Registry
from specdec.testing import tiny_model
from specdec.types import AttentionRequirements


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


@pytest.mark.parametrize(
    ("setting", "backend"),
    [
        ("attention_backend", "specdec.attention.sdpa.SdpaBackend"),
        ("sampling_backend", "specdec.sampling.torch_backend.TorchSampling"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_before_loading(
    setting: str, backend: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{backend}.supports", lambda self, needed: ["runs on an abacus"])
    monkeypatch.setattr("specdec.target.model.load_target", None)
    name = {"attention_backend": "sdpa", "sampling_backend": "torch"}[setting]
    with pytest.raises(PluginUnsuitableError, match="runs on an abacus"):
        build(from_kwargs(model, kv_cache_memory="1MiB", max_model_len=64, **{setting: name}))


def test_a_backend_may_need_the_layers_to_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(self: SdpaBackend, requirements: AttentionRequirements) -> list[str]:
        return [] if requirements.layers[0].num_heads else ["no heads"]

    monkeypatch.setattr(SdpaBackend, "supports", supports)
    build(from_kwargs(model, kv_cache_memory="1MiB", max_model_len=64, stat_loggers=(), attention_backend="sdpa"))
