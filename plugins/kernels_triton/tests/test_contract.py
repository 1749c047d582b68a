"""What holds for the plugin without a device and without the interpreter."""

from __future__ import annotations

from specdec.registry import Registry
from specdec.testing.contracts import PluginContract
from specdec_kernels_triton.backend import INTERPRETED, TritonSampling


class TestPlugin(PluginContract):
    plugin = "specdec_kernels_triton.plugin"
    distribution = "specdec-kernels-triton"


def test_it_is_for_gpus() -> None:
    """Chosen on CUDA, refused on a CPU unless Triton interprets."""
    backend = TritonSampling()
    if INTERPRETED:
        assert backend.supports("cpu") == []
        assert backend.priority < 0
    else:
        assert backend.supports("cuda") == []
        assert backend.supports("cpu") == ["runs on cuda, the engine on cpu"]
        assert backend.priority > 0


def test_it_is_found() -> None:
    assert Registry().select("sampling_backend", "triton").distribution == "specdec-kernels-triton"
