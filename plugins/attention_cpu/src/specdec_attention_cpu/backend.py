"""The CPU attention backend: compiled kernels over the paged cache."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from specdec.attention.interface import AttentionBackend
from specdec.cpu.scratch import words
from specdec.cpu.team import Team
from specdec_attention_cpu.layout import Attention
from specdec_attention_cpu.planning import KERNELS
from specdec_attention_cpu.step import KINDS, Memory, Shape, StepPlan, shape_of

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.attention.interface import KVCache, LayerKV
    from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

_LONG_TOKENS = 64
"""From this many tokens on a layer's attention takes long enough to let other Python threads run."""


class CpuBackend(AttentionBackend):
    """Attention on CPU cores: float32 and bfloat16 caches, grouped heads, windows, chunks, soft caps, sinks, trees."""

    name = "cpu"
    priority = 10

    def __init__(self) -> None:
        KERNELS.load()
        self._team = Team()
        self._memory = Memory()
        self._layers: dict[int, _Layer] = {}

    def supports(self, requirements: AttentionRequirements) -> list[str]:
        """See `AttentionBackend.supports`."""
        reasons = []
        if requirements.device != "cpu":
            reasons.append(f"runs on the CPU, the engine on {requirements.device}")
        if requirements.dtype not in KINDS:
            reasons.append(f"caches {' or '.join(KINDS)}, the engine computes in {requirements.dtype}")
        for layer in requirements.layers:
            if layer.head_dim % 2 or layer.num_heads % layer.num_kv_heads:
                reasons.append(
                    f"layer {layer.index}: needs an even head_dim and a multiple of the K/V heads, "
                    f"got head_dim {layer.head_dim} and {layer.num_heads} heads over {layer.num_kv_heads}"
                )
        return reasons

    def plan(self, batch: PackedBatch, cache: KVCache) -> StepPlan:
        """See `AttentionBackend.plan`."""
        return StepPlan(batch, cache, self._memory, self._team)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
        plan: Any,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        prepared = self._layers.get(layer.index)
        if prepared is None or prepared.layer is not layer:
            prepared = self._layers[layer.index] = _Layer(layer)
        cache = plan.cache.layers[layer.index]
        if prepared.cache is not cache:
            prepared.use(cache)
        step = plan.step(prepared.shape)
        step.begin_layer(query, key, value)
        num_tokens = query.shape[0]
        out = query.new_empty(num_tokens, layer.num_heads, layer.v_head_dim)
        block = prepared.words
        block[Attention.STEP] = step.address
        block[Attention.OUTPUT] = out.data_ptr()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        block[Attention.SINKS] = 0 if sinks is None else sinks.data_ptr()
        self._team.run(KERNELS.address("attention_region"), prepared.address, long=num_tokens >= _LONG_TOKENS)
        return out


class _Layer:
    """A layer's argument block."""

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        self.shape: Shape = shape_of(layer)
        self.cache: LayerKV | None = None
        self.words = words(
            Attention,
            {
                Attention.SCALING: _float_word(layer.scaling),
                Attention.SOFTCAP: _float_word(layer.softcap or 0.0),
                Attention.WINDOW: layer.sliding_window or 0,
                Attention.CHUNK_SIZE: layer.chunk_size or 0,
            },
        )
        self.address = ctypes.addressof(self.words)

    def use(self, cache: LayerKV) -> None:
        """Point to the layer's slots."""
        self.cache = cache
        self.words[Attention.KEY_CACHE] = cache.keys.data_ptr()
        self.words[Attention.VALUE_CACHE] = cache.values.data_ptr()


def _float_word(value: float) -> int:
    """A float32 in the low half of an int64."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
