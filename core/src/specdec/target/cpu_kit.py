"""Replacement modules made of the compiled CPU kernels; what they cannot serve falls to torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.target.compare import close
from specdec.target.kit import GatedMlp, TorchKit, norm_weight
from specdec.target.linear import KINDS, PackedEmbedding, PackedLinear, PackedWeight, packable
from specdec.target.norm import fast_norm

if TYPE_CHECKING:
    from torch import Tensor

_ACTIVATIONS = {"silu": nn.functional.silu, "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh")}


def gate_activation(mlp: Any) -> str | None:
    """Which activation that kernels know a gated MLP uses, by what its ``act_fn`` computes."""
    sample = torch.linspace(-6.0, 6.0, 101)
    computed = mlp.act_fn(sample)
    return next((name for name, function in _ACTIVATIONS.items() if close(computed, function(sample))), None)


class PackedMlp(nn.Module):
    """A gated MLP as two packed products; the activation happens in the first."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden size] -> [..., hidden size]."""
        return self.down_proj(self.gate_up_proj(x))


class CpuKit(TorchKit):
    """See `TorchKit`."""

    def joined(self, linears: Sequence[nn.Linear]) -> nn.Module | None:
        """See `TorchKit.joined`."""
        if not packable(*linears):
            return super().joined(linears)
        return PackedLinear(PackedWeight.of(linears))

    def gated_mlp(self, mlp: Any) -> nn.Module | None:
        """See `TorchKit.gated_mlp`."""
        if not packable(mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            return super().gated_mlp(mlp)
        down, activation = PackedLinear(PackedWeight.of([mlp.down_proj])), gate_activation(mlp)
        if activation is None:
            return GatedMlp(PackedLinear(PackedWeight.of([mlp.gate_proj, mlp.up_proj])), mlp.act_fn, down)
        gated = PackedWeight.gated(mlp.gate_proj, mlp.up_proj)
        return PackedMlp(PackedLinear(gated, activation, mlp.gate_proj.out_features), down)

    def norm(self, module: nn.Module) -> nn.Module | None:
        """See `TorchKit.norm`."""
        found = norm_weight(module)
        if found is None or found[0].dtype not in KINDS:
            return super().norm(module)
        return fast_norm(module)

    def linear(self, linear: nn.Linear) -> nn.Module | None:
        """See `TorchKit.linear`."""
        return PackedLinear(PackedWeight.of([linear])) if packable(linear) else None

    def tied_embedding(self, embedding: nn.Embedding, linear: nn.Linear) -> tuple[nn.Module, nn.Module] | None:
        """See `TorchKit.tied_embedding`."""
        if not packable(linear):
            return None
        packed = PackedWeight.of([linear])
        scale = getattr(embedding, "embed_scale", None)
        factor = None if scale is None else torch.as_tensor(scale, dtype=packed.dtype)
        return PackedLinear(packed), PackedEmbedding(packed, factor)
