"""Choosing a sampling backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import PluginNotFoundError, PluginUnsuitableError
from specdec.registry import Registry

from .conftest import Toys

BACKEND = """
from specdec.hookspecs import hookimpl
from specdec.sampling.torch_backend import TorchSampling


class Toy(TorchSampling):
    name = {name!r}
    priority = {priority}

    def supports(self, device):
        return [] if device == {device!r} else [f"not made for {{device}}"]


@hookimpl
def sampling_backend(engine):
    return Toy()
"""


def _add(toys: Toys, name: str, priority: int, device: str) -> None:
    points = {"specdec.sampling_backends": {name: f"toy_{name}"}}
    code = BACKEND.format(name=name, priority=priority, device=device)
    toys.add(f"toy-{name}", points, files={f"toy_{name}.py": code})


def _pick(device: str, wanted: str = "auto") -> Any:
    engine: Any = SimpleNamespace(device=device)
    return Registry().sampling_backend(engine, wanted)


def test_auto_takes_the_best_for_the_device(toys: Toys) -> None:
    _add(toys, "slow", 0, "cuda")
    _add(toys, "fast", 5, "cuda")
    _add(toys, "other", 9, "cpu")
    assert _pick("cuda").name == "fast"
    assert _pick("cpu").name == "other"
    assert _pick("cuda", "slow").name == "slow"


def test_what_cannot_serve_is_refused_with_the_reasons(toys: Toys) -> None:
    _add(toys, "fast", 5, "cuda")
    with pytest.raises(
        PluginUnsuitableError, match="No installed sampling backend can serve the device 'cpu': fast: not"
    ):
        _pick("cpu")
    with pytest.raises(PluginUnsuitableError, match="sampling backend 'fast' of toy-fast .* not made for cpu"):
        _pick("cpu", "fast")
    with pytest.raises(PluginNotFoundError, match="pip install specdec-kernels-triton"):
        _pick("cuda", "triton")


def test_the_built_in_ones() -> None:
    assert (_pick("cpu").name, _pick("mps").name) == ("cpu", "torch")
