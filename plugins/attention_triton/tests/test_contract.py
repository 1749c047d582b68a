"""What holds for the plugin without a device and without the interpreter."""

from __future__ import annotations

from specdec.attention.sdpa import SdpaBackend
from specdec.registry import Registry
from specdec.testing.attention import attention_layer, attention_requirements
from specdec.testing.contracts import PluginContract
from specdec_attention_triton.backend import INTERPRETED, TritonBackend


class TestPlugin(PluginContract):
    plugin = "specdec_attention_triton.plugin"
    distribution = "specdec-attention-triton"


def reasons(device: str, dtype: str = "bfloat16", **layer: int) -> list[str]:
    requirements = attention_requirements([attention_layer(**layer)], block_size=16, dtype=dtype, device=device)
    return TritonBackend().supports(requirements)


def test_it_is_for_gpus() -> None:
    """Chosen on CUDA before the built-in one, refused on a CPU unless Triton interprets."""
    if INTERPRETED:
        assert reasons("cpu") == []
        assert TritonBackend().priority < SdpaBackend().priority
    else:
        assert reasons("cuda") == []
        assert reasons("cpu") == ["runs on cuda, the engine on cpu"]
        assert TritonBackend().priority > SdpaBackend().priority


def test_all_reasons_are_named() -> None:
    found = reasons("mps", "float64", head_dim=320, num_heads=3)
    assert [word in text for word, text in zip(("mps", "float64", "320"), found, strict=True)] == [True] * 3


def test_it_is_found() -> None:
    assert Registry().select("attention_backend", "triton").distribution == "specdec-attention-triton"
