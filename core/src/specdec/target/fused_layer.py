"""Decoder layers as straight-line calls of compiled regions (CPU).

What lies between two attentions is one region: output projection, residual sum, norm, gated MLP, residual sum, and the
next layer's norm, query/key/value projection and rotary positions. Attention itself goes to the engine's backend
through `specdec.target.bridge`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from specdec.cpu.layout import Between, Layer, Step
from specdec.cpu.scratch import reserve, words
from specdec.cpu.team import KERNELS, Team
from specdec.target import bridge
from specdec.target.linear import GATES, KINDS, PackedWeight
from specdec.target.norm import NormWeight

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[[int, "Tensor", "Tensor", "Tensor", None], "Tensor"]
"""``attend(layer_index, query, key, value, sinks)``, like `specdec.target.bridge.attend`."""

_LONG_ROWS, _LONG_BYTES = 32, 64 << 20
"""From this many rows, or bytes of a layer's weights, on a region takes long enough to let other Python threads run."""


@frozen(eq=False, kw_only=True)
class LayerWeights:
    """Everything a llama-like decoder layer computes with."""

    index: int
    """Of the attention layer, for the backend."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_norm: NormWeight | None
    """None for the first layer of a draft head: queries, keys and values are projected from `FusedLayers.run`'s
    ``inputs``, which may be wider than the residual stream."""
    qkv: PackedWeight
    query_norm: NormWeight | None
    key_norm: NormWeight | None
    output: PackedWeight
    post_norm: NormWeight
    gate_up: PackedWeight
    down: PackedWeight
    activation: str
    """A key of `specdec.target.linear.GATES`."""
    rotates: bool = True
    """Whether queries and keys are rotated by position."""

    @property
    def shape(self) -> tuple[int, ...]:
        """What layers that run together must agree in."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.qkv.in_features, self.qkv.out_features)
        return (*sizes, self.output.in_features)

    @property
    def widest(self) -> int:
        """Width of the widest left side of a product."""
        return max(weight.in_features for weight in (self.qkv, self.output, self.gate_up, self.down))

    @property
    def num_bytes(self) -> int:
        """Memory that the packed weights take."""
        return sum(weight.num_bytes for weight in (self.qkv, self.output, self.gate_up, self.down))


def _layer_words(weights: LayerWeights) -> ctypes.Array[ctypes.c_int64]:
    return words(
        Layer,
        {
            Layer.HIDDEN_SIZE: weights.output.out_features,
            Layer.QUERY_HEADS: weights.num_heads,
            Layer.KEY_HEADS: weights.num_kv_heads,
            Layer.HEAD_DIM: weights.head_dim,
            Layer.QKV_WIDTH: weights.qkv.out_features,
            Layer.ATTENDED_WIDTH: weights.output.in_features,
            Layer.ACTIVATION: GATES[weights.activation],
            Layer.INPUT_NORM: weights.input_norm.address if weights.input_norm else 0,
            Layer.QKV: weights.qkv.address,
            Layer.QUERY_NORM: weights.query_norm.address if weights.query_norm else 0,
            Layer.KEY_NORM: weights.key_norm.address if weights.key_norm else 0,
            Layer.OUTPUT: weights.output.address,
            Layer.POST_NORM: weights.post_norm.address,
            Layer.GATE_UP: weights.gate_up.address,
            Layer.DOWN: weights.down.address,
            Layer.ROTATES: int(weights.rotates),
            Layer.INPUT_WIDTH: weights.qkv.in_features,
        },
    )


class FusedLayers:
    """A run of decoder layers of one shape, computed in place on a residual stream."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        """Prepare the argument blocks of layers that agree in head counts, widths and dtype."""
        self.layers = tuple(layers)
        first = layers[0]
        self._heads = (first.num_heads, first.num_kv_heads, first.head_dim)
        self._dtype = first.qkv.dtype
        self._width = first.qkv.out_features
        self._widest = max(layer.widest for layer in layers)
        self._heavy = max(layer.num_bytes for layer in layers) >= _LONG_BYTES
        self._team = Team()
        self._step = words(Step, {Step.TEAM: self._team.address, Step.KIND: KINDS[self._dtype]})
        self._descriptions = [_layer_words(layer) for layer in layers]
        described = [ctypes.addressof(block) for block in self._descriptions]
        step = ctypes.addressof(self._step)
        self._calls = [
            words(Between, {Between.STEP: step, Between.AFTER: after, Between.BEFORE: before})
            for after, before in zip([0, *described], [*described, 0], strict=True)
        ]
        self._arguments = [ctypes.addressof(block) for block in self._calls]
        self._qkv = torch.empty(0, dtype=self._dtype)

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        tap: Callable[[int], None] | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Apply all layers.

        Args:
            hidden: [T, hidden size], contiguous; holds the result afterwards.
            cos: [T, rotary width], contiguous, in the dtype of ``hidden``; the second half repeats the first.
            sin: the same.
            attend: computes attention; gets views of a buffer that the next layer overwrites.
            tap: called with i when ``hidden`` is the output of the i-th layer.
            inputs: [T, input width of the projection], contiguous, for layers without an input norm.
        """
        self._step[Step.INPUT] = 0 if inputs is None else inputs.data_ptr()
        query, key, value = self._begin(hidden, cos, sin)
        step, start = self._step, self._team.run
        region, long = KERNELS.address("between_attention_region"), self._heavy or hidden.shape[0] >= _LONG_ROWS
        start(region, self._arguments[0], long=long)
        for i, layer in enumerate(self.layers):
            attended = attend(layer.index, query, key, value, None)
            step[Step.ATTENDED] = attended.data_ptr()
            start(region, self._arguments[i + 1], long=long)
            if tap is not None:
                tap(i)

    def _begin(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Point the step's block at this pass's tensors; views of the query, key and value buffer."""
        num_tokens = hidden.shape[0]
        if self._qkv.shape[0] < num_tokens:
            self._qkv = torch.empty(num_tokens, self._width, dtype=self._dtype)
        qkv = self._qkv[:num_tokens]
        area = reserve(self._widest, 2)
        step = self._step
        step[Step.ROWS] = num_tokens
        step[Step.HIDDEN] = hidden.data_ptr()
        step[Step.QKV] = qkv.data_ptr()
        step[Step.COS] = cos.data_ptr()
        step[Step.SIN] = sin.data_ptr()
        step[Step.ROTARY] = cos.shape[-1]
        step[Step.SCRATCH] = area.address
        step[Step.SCRATCH_STRIDE] = area.stride
        step[Step.BLOCK_ROWS] = area.block_rows
        heads, kv_heads, head_dim = self._heads
        by_head = qkv.view(num_tokens, heads + 2 * kv_heads, head_dim)
        return by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]


class FusedDecoderLayer(nn.Module):
    """Takes the place of a llama-like decoder layer of transformers, with the same call."""

    def __init__(self, weights: LayerWeights, original: nn.Module) -> None:
        """Wrap packed weights.

        Args:
            weights: of the layer.
            original: the layer whose place this one takes; its plain attributes (``attention_type``, …) are copied.
        """
        super().__init__()
        self.weights = weights
        self._layers = FusedLayers([weights])
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        """[1, T, hidden size] -> the layer's output; everything but the rotary angles is the backend's business."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1]).clone(memory_format=torch.contiguous_format)
        cos, sin = (angle.reshape(hidden.shape[0], -1).contiguous() for angle in position_embeddings)
        self._layers.run(hidden, cos, sin, bridge.attend)
        return hidden.view(hidden_states.shape)
