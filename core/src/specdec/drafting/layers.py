"""Decoder layers for draft heads, which attend through `specdec.target.bridge` and so run over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import nn

from specdec.drafting.modules import is_packed, linear, rms_norm, rotate_halves
from specdec.target import bridge
from specdec.target.fused_layer import FusedLayers, LayerWeights
from specdec.target.linear import PackedWeight
from specdec.target.norm import NormWeight
from specdec.types import AttentionLayer

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"silu": nn.functional.silu, "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh")}
"""Activations of the gated feed-forward part, by the names configurations use."""

_PACKED_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@frozen(eq=False, kw_only=True)
class LlamaWeights:
    """The weights of a Llama-like decoder layer without its input norm, in the dtype and on the device to compute in.

    Rotary halves are ``[first half; second half]`` in every head, as transformers keeps them.
    """

    query: Tensor
    """[heads * head_dim, input width]; the input may be wider than the residual stream."""
    key: Tensor
    value: Tensor
    output: Tensor
    """[hidden size, heads * head_dim]."""
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    query_norm: Tensor | None = None
    """[head_dim]: RMS norm of every query head before rotation; ``key_norm`` alike."""
    key_norm: Tensor | None = None
    eps: float
    head_dim: int
    activation: str = field(default="silu")
    """A key of `ACTIVATIONS`."""
    rotates: bool = True
    """Whether queries and keys are rotated by position."""

    def attention_layer(self, index: int, sliding_window: int | None = None) -> AttentionLayer:
        """What an attention backend must know of this layer."""
        return AttentionLayer(
            index=index,
            num_heads=self.query.shape[0] // self.head_dim,
            num_kv_heads=self.key.shape[0] // self.head_dim,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            sliding_window=sliding_window,
        )


class LlamaLayer:
    """``y = residual + attention(inputs)``, ``y + mlp(norm(y))``: what follows the input norm of a Llama-like layer.

    The caller gives the attention's input, so a head decides whether and what is normalised or concatenated before.
    """

    def __init__(self, weights: LlamaWeights, index: int, sliding_window: int | None = None) -> None:
        """Prepare the layer; on the CPU the weights are packed for the compiled kernels.

        Args:
            weights: of the layer.
            index: of the layer within the head.
            sliding_window: tokens that a token sees, itself included; None: all.
        """
        self.attention = weights.attention_layer(index, sliding_window)
        self._run = _packed(weights, self.attention) if _can_pack(weights) else _Plain(weights, self.attention)

    def __call__(self, inputs: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the layer.

        Args:
            inputs: [T, input width] of the projections.
            residual: [T, hidden size].
            cos: [T, rotary width].
            sin: the same.

        Returns:
            [T, hidden size], a fresh tensor.
        """
        return self._run(inputs, residual, cos, sin)


def _can_pack(weights: LlamaWeights) -> bool:
    parts = (weights.query, weights.output, weights.gate, weights.down)
    return weights.activation in _PACKED_ACTIVATIONS and all(is_packed(part) for part in parts)


def _joined_bias(weights: LlamaWeights) -> Tensor | None:
    pairs = (
        (weights.query_bias, weights.query),
        (weights.key_bias, weights.key),
        (weights.value_bias, weights.value),
    )
    if all(bias is None for bias, _ in pairs):
        return None
    return torch.cat([weight.new_zeros(weight.shape[0]) if bias is None else bias for bias, weight in pairs])


class _Packed:
    """Over the compiled CPU regions."""

    def __init__(self, layers: FusedLayers) -> None:
        self._layers = layers

    def __call__(self, inputs: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        stream = residual.clone(memory_format=torch.contiguous_format)
        self._layers.run(stream, cos, sin, bridge.attend, inputs=inputs.contiguous())
        return stream


def _packed(weights: LlamaWeights, layer: AttentionLayer) -> _Packed:
    def as_linear(weight: Tensor) -> nn.Linear:
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module

    def as_norm(weight: Tensor | None) -> NormWeight | None:
        return None if weight is None else NormWeight(weight, weights.eps, rounds_first=True)

    rows = torch.cat([weights.query, weights.key, weights.value])
    post_norm = NormWeight(weights.post_norm, weights.eps, rounds_first=True)
    return _Packed(
        FusedLayers(
            [
                LayerWeights(
                    index=layer.index,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    input_norm=None,
                    qkv=PackedWeight(rows, _joined_bias(weights)),
                    query_norm=as_norm(weights.query_norm),
                    key_norm=as_norm(weights.key_norm),
                    output=PackedWeight(weights.output, weights.output_bias),
                    post_norm=post_norm,
                    gate_up=PackedWeight.gated(as_linear(weights.gate), as_linear(weights.up)),
                    down=PackedWeight(weights.down, None),
                    activation=_PACKED_ACTIVATIONS[weights.activation],
                    rotates=weights.rotates,
                )
            ]
        )
    )


class _Plain:
    """Of torch operations, for any device and dtype."""

    def __init__(self, weights: LlamaWeights, layer: AttentionLayer) -> None:
        self._layer = layer
        self._rotates = weights.rotates
        self._qkv = linear(torch.cat([weights.query, weights.key, weights.value]), _joined_bias(weights))
        self._output = linear(weights.output, weights.output_bias)
        self._norms = [
            None if weight is None else rms_norm(weight, weights.eps)
            for weight in (weights.query_norm, weights.key_norm)
        ]
        self._post_norm = rms_norm(weights.post_norm, weights.eps)
        self._gate_up = linear(torch.cat([weights.gate, weights.up]))
        self._down = linear(weights.down)
        self._activation = ACTIVATIONS[weights.activation]

    def __call__(self, inputs: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layer = self._layer
        heads = self._qkv(inputs).view(inputs.shape[0], -1, layer.head_dim)
        query, key, value = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        query, key = (
            part if norm is None else norm(part) for part, norm in zip((query, key), self._norms, strict=True)
        )
        if self._rotates:
            query, key = rotate_halves(query, cos, sin), rotate_halves(key, cos, sin)
        attended = bridge.attend(layer.index, query, key, value)
        stream = residual + self._output(attended.flatten(1))
        gate, up = self._gate_up(self._post_norm(stream)).chunk(2, dim=-1)
        result: Tensor = stream + self._down(self._activation(gate) * up)
        return result
