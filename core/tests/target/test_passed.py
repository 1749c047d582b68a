"""A start repeats no comparison that came out well before, and every one whose outcome may have changed.

The work is counted in forward passes, which are what takes long in a start.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig
from specdec.cpu import library
from specdec.errors import UnsupportedModelError
from specdec.target import fusion, passed
from specdec.target.fused_stack import FusedStack
from specdec.target.model import TargetModel, load_target
from specdec.testing import tiny_model, tiny_module

FIRST = {"model": 7, "stack": 3}
"""Of a llama: alone (2), traced, packed (2), probed, beside the stack; the stack beside the model, and packed (2)."""
LATER = {"model": 3, "stack": 1}
"""Traced, probed, and the stack beside the model."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Forward passes so far, of transformers' models and of stacks."""
    counts: Counter[str] = Counter()
    run_stack = FusedStack.__call__

    def stack(self: FusedStack, *arguments: Any, **options: Any) -> Any:
        counts["stack"] += 1
        return run_stack(self, *arguments, **options)

    def module(module: torch.nn.Module, _arguments: Any) -> None:
        if type(module).__name__.endswith("ForCausalLM"):
            counts["model"] += 1

    monkeypatch.setattr(FusedStack, "__call__", stack)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(module)
    yield counts
    handle.remove()


def start(checkpoint: Path, passes: Counter[str], **settings: Any) -> dict[str, int]:
    """The forward passes of a start."""
    passes.clear()
    load_target(EngineConfig(**{"model": str(checkpoint), "dtype": "float32", "device": "cpu", **settings}))
    return dict(passes)


def test_the_second_start_repeats_no_comparison(checkpoint: Path, passes: Counter[str]) -> None:
    assert start(checkpoint, passes) == FIRST
    assert start(checkpoint, passes) == LATER
    assert start(checkpoint, passes, fuse=False) == {"model": 5}
    assert start(checkpoint, passes, fuse=False) == {"model": 1}


def test_garbage_is_collected_once(checkpoint: Path, passes: Counter[str]) -> None:
    """Every round looks at each of some hundred thousand objects."""
    rounds: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            rounds.append(info["generation"])

    gc.callbacks.append(note)
    try:
        start(checkpoint, passes)
    finally:
        gc.callbacks.remove(note)
    assert rounds.count(2) == 1
    assert len(rounds) < 20  # younger ones come before and after
    assert gc.isenabled()


def test_the_model_still_gives_its_logits(checkpoint: Path, passes: Counter[str]) -> None:
    ids = torch.tensor([5, 9, 200])
    logits = []
    for expected in (FIRST, LATER):
        assert start(checkpoint, passes) == expected
        target = load_target(EngineConfig(model=str(checkpoint), dtype="float32", device="cpu"))
        with passed_context(target):
            logits.append(target._parts.logits(ids, torch.arange(3)))
    assert torch.equal(*logits)


def passed_context(target: TargetModel) -> Any:
    from specdec.target import bridge

    return bridge.using(bridge.ReferenceContext(target._trace.layers, target._trace.index_of, {}))


def _other_time(checkpoint: Path, _patch: pytest.MonkeyPatch) -> None:
    os.utime(checkpoint / "config.json", (1, 1))


def _another_file(checkpoint: Path, _patch: pytest.MonkeyPatch) -> None:
    (checkpoint / "adapter.json").write_text("{}")


def _other_weights(checkpoint: Path, _patch: pytest.MonkeyPatch) -> None:
    other = tiny_model("llama", checkpoint.with_name("other"), seed=1)
    shutil.copyfile(other / "model.safetensors", checkpoint / "model.safetensors")


def _other_version(_checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passed, "version", lambda name: "9" if name == "transformers" else "1")


def _other_processor(_checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "_processor", lambda: ("another",))
    library.surroundings.cache_clear()


def _other_capability(_checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NOTHING")


def _other_code(checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.copytree(passed._OWN_CODE, checkpoint.parent / "specdec")
    patch.setattr(passed, "_OWN_CODE", checkpoint.parent / "specdec")
    with (checkpoint.parent / "specdec" / "cpu" / "tiles.py").open("a") as file:
        file.write("\n")


def _other_precision(_checkpoint: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")


@pytest.mark.parametrize(
    "change",
    [
        _other_time,
        _another_file,
        _other_weights,
        _other_version,
        _other_processor,
        _other_capability,
        _other_code,
        _other_precision,
    ],
)
def test_whatever_may_change_the_outcome_brings_the_comparison_back(
    change: Any, checkpoint: Path, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(checkpoint, passes) == FIRST
    assert start(checkpoint, passes) == LATER
    change(checkpoint, monkeypatch)
    try:
        assert start(checkpoint, passes) == FIRST
    finally:
        library.surroundings.cache_clear()


def test_another_dtype_is_compared_for_itself(checkpoint: Path, passes: Counter[str]) -> None:
    assert start(checkpoint, passes) == FIRST
    assert start(checkpoint, passes, dtype="bfloat16") == FIRST


def test_what_is_refused_is_not_remembered(
    checkpoint: Path, passes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: Any) -> list[str]:
        model.lm_head.weight.data[3:] *= 1.5
        return ["a faulty pass"]

    with monkeypatch.context() as patch:
        patch.setattr(fusion, "fuse", spoil)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="fused modules give other results"):
                start(checkpoint, passes)
    assert start(checkpoint, passes) == FIRST


def test_models_in_memory_and_classes_from_elsewhere_are_always_compared(
    checkpoint: Path, passes: Counter[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, folder in ((None, None), (checkpoint, None), (None, cache)):
        for _ in range(2):
            passes.clear()
            TargetModel.from_model(tiny_module("llama"), name="m", path=path, cache=folder)
            assert dict(passes) == FIRST
    model = tiny_module("llama")
    monkeypatch.setattr(type(model.model), "__module__", "transformers_modules.mine")
    for _ in range(2):
        assert start(checkpoint, passes) == FIRST


def test_a_cache_that_cannot_be_written_stops_no_start(checkpoint: Path, passes: Counter[str], cache: Path) -> None:
    (cache / "checks").touch()
    for _ in range(2):
        assert start(checkpoint, passes) == FIRST


def test_what_nobody_used_for_a_month_is_removed(checkpoint: Path, passes: Counter[str], cache: Path) -> None:
    start(checkpoint, passes)
    (entry,) = (cache / "checks").iterdir()
    os.utime(entry, (1, 1))
    assert start(checkpoint, passes) == LATER
    assert entry.stat().st_mtime > 1
    os.utime(entry, (1, 1))
    start(checkpoint, passes, dtype="bfloat16")
    assert entry not in set((cache / "checks").iterdir())
