"""Decoder layers with multi-head latent attention (DeepSeek-AI 2024) for draft heads; K/V is cached expanded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from specdec.drafting.feed_forward import DenseSizes
from specdec.drafting.layers import ACTIVATIONS
from specdec.drafting.modules import linear, rms_norm, rotate_halves
from specdec.errors import ModelLoadError
from specdec.target import bridge
from specdec.types import AttentionLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specdec.drafting.checkpoint import HeadCheckpoint, Shape
    from specdec.drafting.feed_forward import FeedForwardSizes


@frozen(kw_only=True)
class MlaSizes:
    """Widths of DeepSeek's layers, with transformers' names."""

    hidden_size: int
    dense: DenseSizes
    """The feed-forward part of layers that are not in ``mixtures``."""
    mixtures: Mapping[str, FeedForwardSizes] = field(factory=dict)
    """Layers with a mixture of experts, by name: ``layers.0`` and so on."""
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    hidden_act: str
    scaling: float
    """Factor on the scores."""
    rope_interleave: bool
    """Whether rotary pairs are neighbours (DeepSeek) or halves."""

    @staticmethod
    def of(checkpoint: HeadCheckpoint, mixtures: Mapping[str, FeedForwardSizes] | None = None) -> MlaSizes:
        """Read them from a configuration.

        Args:
            checkpoint: of the head.
            mixtures: its layers with a mixture of experts (`specdec.drafting.feed_forward.mixtures_of`).

        Raises:
            ModelLoadError: a key is missing or the activation is unknown.
        """
        config, require = checkpoint.config, checkpoint.require
        activation = str(config.get("hidden_act") or "silu")
        if activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"{checkpoint.directory}: hidden_act is {activation!r}, heads know {', '.join(ACTIVATIONS)}"
            )
        width = int(require("qk_nope_head_dim")) + int(require("qk_rope_head_dim"))
        rank = config.get("q_lora_rank")
        return MlaSizes(
            hidden_size=int(require("hidden_size")),
            dense=DenseSizes(int(require("intermediate_size"))),
            mixtures=mixtures or {},
            num_attention_heads=int(require("num_attention_heads")),
            q_lora_rank=None if rank is None else int(rank),
            kv_lora_rank=int(require("kv_lora_rank")),
            qk_nope_head_dim=int(require("qk_nope_head_dim")),
            qk_rope_head_dim=int(require("qk_rope_head_dim")),
            v_head_dim=int(require("v_head_dim")),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            hidden_act=activation,
            scaling=width**-0.5 * _yarn_scale(config) ** 2,
            rope_interleave=bool(config.get("rope_interleave", True)),
        )

    @property
    def eps(self) -> float:
        """Of norms."""
        return self.rms_norm_eps

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shapes(self, prefix: str, input_width: int | None = None) -> dict[str, Shape]:
        """Names and shapes of a layer's tensors but for the input norm; see `LayerReader.shapes`."""
        h, heads, wide = self.hidden_size, self.num_attention_heads, input_width or self.hidden_size
        attention = f"{prefix}.self_attn"
        queries: dict[str, Shape] = {f"{attention}.q_proj.weight": (heads * self.qk_head_dim, wide)}
        if self.q_lora_rank is not None:
            queries = {
                f"{attention}.q_a_proj.weight": (self.q_lora_rank, wide),
                f"{attention}.q_a_layernorm.weight": (self.q_lora_rank,),
                f"{attention}.q_b_proj.weight": (heads * self.qk_head_dim, self.q_lora_rank),
            }
        return queries | {
            f"{attention}.kv_a_proj_with_mqa.weight": (self.kv_lora_rank + self.qk_rope_head_dim, wide),
            f"{attention}.kv_a_layernorm.weight": (self.kv_lora_rank,),
            f"{attention}.kv_b_proj.weight": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            f"{attention}.o_proj.weight": (h, heads * self.v_head_dim),
            f"{prefix}.post_attention_layernorm.weight": (h,),
            **self.feed_forward(prefix).shapes(f"{prefix}.mlp", h),
        }

    def feed_forward(self, prefix: str) -> FeedForwardSizes:
        """The sizes of a layer's feed-forward part."""
        return self.mixtures.get(prefix, self.dense)

    def optional_shapes(self, prefix: str) -> dict[str, Shape]:
        """None."""
        return {}

    def layer(self, tensors: Mapping[str, Tensor], prefix: str, index: int, window: int | None = None) -> MlaLayer:
        """A layer behind its input norm."""
        return MlaLayer(self, tensors, prefix, index, window)

    def rotary(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Angles are as wide as the rotated part of a head."""
        return {**config, "head_dim": self.qk_rope_head_dim}


def _yarn_scale(config: Mapping[str, Any]) -> float:
    """The factor that YaRN puts on queries and keys of these models (``mscale_all_dim``)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, weight = float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0)
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 and weight else 1.0


class MlaLayer:
    """See `specdec.drafting.recurrent.DraftLayer`."""

    def __init__(
        self, sizes: MlaSizes, tensors: Mapping[str, Tensor], prefix: str, index: int, window: int | None = None
    ) -> None:
        """Prepare the layer ``prefix`` from tensors of the names that `MlaSizes.shapes` gives."""
        self._sizes = sizes
        self.attention = AttentionLayer(
            index=index,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_attention_heads,
            head_dim=sizes.qk_head_dim,
            v_head_dim=sizes.v_head_dim,
            scaling=sizes.scaling,
            sliding_window=window,
        )

        def weight(name: str) -> Tensor:
            return tensors[f"{prefix}.{name}.weight"]

        self._query = linear(weight("self_attn.q_b_proj" if sizes.q_lora_rank else "self_attn.q_proj"))
        self._query_low = linear(weight("self_attn.q_a_proj")) if sizes.q_lora_rank else None
        self._query_norm = rms_norm(weight("self_attn.q_a_layernorm"), sizes.eps) if sizes.q_lora_rank else None
        self._latent = linear(weight("self_attn.kv_a_proj_with_mqa"))
        self._latent_norm = rms_norm(weight("self_attn.kv_a_layernorm"), sizes.eps)
        self._expand = linear(weight("self_attn.kv_b_proj"))
        self._output = linear(weight("self_attn.o_proj"))
        self._post_norm = rms_norm(weight("post_attention_layernorm"), sizes.eps)
        self._feed_forward = sizes.feed_forward(prefix).build(tensors, f"{prefix}.mlp", sizes.hidden_act)

    def __call__(self, inputs: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `specdec.drafting.recurrent.DraftLayer`."""
        query, key, value = self._projected(inputs, cos, sin)
        attended = bridge.attend(self.attention.index, query, key, value)
        stream = residual + self._output(attended.flatten(1))
        result: Tensor = stream + self._feed_forward(self._post_norm(stream))
        return result

    def _projected(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes, count = self._sizes, inputs.shape[0]
        low = inputs
        if self._query_low is not None and self._query_norm is not None:
            low = self._query_norm(self._query_low(inputs))
        query = self._query(low).view(count, sizes.num_attention_heads, sizes.qk_head_dim)
        latent, key_rope = self._latent(inputs).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = self._expand(self._latent_norm(latent.contiguous())).view(count, sizes.num_attention_heads, -1)
        key, value = expanded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        query_nope, query_rope = query.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        query_rope = self._rotated(query_rope, cos, sin)
        key_rope = self._rotated(key_rope[:, None], cos, sin).expand(-1, sizes.num_attention_heads, -1)
        return torch.cat([query_nope, query_rope], -1), torch.cat([key, key_rope], -1), value.contiguous()

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._sizes.rope_interleave:
            heads = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate_halves(heads, cos, sin)
