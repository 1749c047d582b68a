"""Parts that draft heads are made of: fast linears and norms, rotary angles, and what they share with the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn

from specdec.target.fused_stack import RotaryTable
from specdec.target.kit import RmsNorm
from specdec.target.linear import KINDS, PackedEmbedding, PackedLinear, PackedWeight
from specdec.target.norm import FastNorm, NormWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from specdec.target.model import TargetModel


def is_packed(weight: Tensor) -> bool:
    """Whether the compiled CPU kernels serve a weight [out, in]."""
    return weight.device.type == "cpu" and weight.dtype in KINDS and weight.shape[-1] % 2 == 0


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A linear for inference: packed for the CPU kernels where they serve it.

    Args:
        weight: [out, in], in the dtype and on the device to compute in.
        bias: [out] or None.
    """
    if is_packed(weight):
        return PackedLinear(PackedWeight(weight, bias))
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def rms_norm(weight: Tensor, eps: float) -> nn.Module:
    """An RMS norm over the last dimension, rounded as Llama's.

    Args:
        weight: [width].
        eps: added to the mean square.
    """
    parameter = nn.Parameter(weight, requires_grad=False)
    if weight.device.type == "cpu" and weight.dtype in KINDS:
        return FastNorm(NormWeight(weight, eps, rounds_first=True), parameter)
    return RmsNorm(parameter, weight, eps)


@frozen(eq=False)
class NormedLinear:
    """A linear after a norm, in one compiled region where both have one."""

    norm: nn.Module
    linear: nn.Module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if isinstance(self.linear, PackedLinear) and isinstance(self.norm, FastNorm):
            return self.linear.normalized(self.norm.norm_weight, hidden_states)
        result: Tensor = self.linear(self.norm(hidden_states))
        return result


_ROPE_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


class Rotary:
    """Rotary angles of a head, by its own configuration; never the target's."""

    def __init__(self, config: Mapping[str, Any], like: Tensor) -> None:
        """Prepare the angles.

        Args:
            config: a head's configuration with Llama's keys; a missing ``rope_theta`` means 10000.
            like: a tensor of the dtype and device of the head.
        """
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        keys = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
        module = LlamaRotaryEmbedding(LlamaConfig.from_dict(keys)).to(like.device)
        self._like = like.new_zeros(1)
        self._module = module
        self._table = RotaryTable(module, like.dtype) if like.device.type == "cpu" else None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos and sin, [T, width] each."""
        if self._table is not None:
            return self._table(positions)
        cos, sin = self._module(self._like, positions[None])
        return cos[0], sin[0]


# --- shared with the target -------------------------------------------------------------------------


def target_embedding(target: TargetModel) -> Callable[[Tensor], Tensor]:
    """The target's embedding table without the scale some models put on it: int64 [T] -> [T, H]."""
    embedding = target.model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        return embedding.packed.rows
    table: Tensor = embedding.weight
    return lambda token_ids: nn.functional.embedding(token_ids, table)


def embedding(table: Tensor) -> Callable[[Tensor], Tensor]:
    """A head's own embedding table [V, h]: int64 [T] -> [T, h]."""
    return lambda token_ids: nn.functional.embedding(token_ids, table)


def target_output_rows(target: TargetModel, token_ids: Tensor) -> Tensor:
    """Rows of the target's output linear.

    Args:
        target: the target.
        token_ids: int64 [n].

    Returns:
        [n, H], a fresh tensor.
    """
    head = target.model.get_output_embeddings()
    if isinstance(head, PackedLinear):
        return head.packed.rows(token_ids)
    rows: Tensor = head.weight.detach()[token_ids.to(head.weight.device)]
    return rows


def target_output(target: TargetModel) -> nn.Module:
    """The target's output linear as a module of its own: final hidden states [T, H] -> logits [T, V].

    Soft caps and scales that a model applies to logits afterwards keep their order and are left out.
    """
    head: nn.Module = target.model.get_output_embeddings()
    return head


ROUTER = ".mlp.gate."
"""Part of the names of the tensors that choose experts; they stay in float32, as choices hang on their last bits."""


def moved(tensors: Mapping[str, Tensor], target: TargetModel) -> dict[str, Tensor]:
    """Floating-point tensors in the target's dtype on its device, those of a `ROUTER` in float32; others only on its
    device."""

    def dtype(name: str, tensor: Tensor) -> torch.dtype | None:
        if not tensor.is_floating_point():
            return None
        return torch.float32 if ROUTER in name else target.dtype

    return {name: tensor.to(target.device, dtype(name, tensor)) for name, tensor in tensors.items()}


def rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, n, d] by angles [T, width], half against half; what lies beyond the width stays."""
    width = cos.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    first, second = turned.chunk(2, dim=-1)
    result = turned * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result
