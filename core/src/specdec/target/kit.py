"""Replacement modules made of torch operations, for any device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.target.compare import close, noise

if TYPE_CHECKING:
    from torch import Tensor


class RmsNorm(nn.Module):
    """An RMS norm over the last dimension as one torch operation."""

    def __init__(self, weight: nn.Parameter, factor: Tensor, eps: float) -> None:
        """Wrap a norm's weight.

        Args:
            weight: the parameter of the original module.
            factor: what normalised values are multiplied with: the weight itself, or 1 + weight.
            eps: added to the mean square.
        """
        super().__init__()
        self.weight = weight
        self._factor = factor
        self._eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> the same shape, normalised."""
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self._factor, self._eps)


class GatedMlp(nn.Module):
    """A gated MLP: ``down(act_fn(gate) * up)`` with gate and up computed by one linear."""

    def __init__(self, gate_up: nn.Module, act_fn: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = gate_up, act_fn, down

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden size] -> [..., hidden size]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class TorchKit:
    """Makes replacements; each method returns None where it has nothing better than the original."""

    def joined(self, linears: Sequence[nn.Linear]) -> nn.Module | None:
        """One linear that gives the outputs of several, concatenated."""
        first = linears[0]
        joint = nn.Linear(
            first.in_features,
            sum(linear.out_features for linear in linears),
            bias=any(linear.bias is not None for linear in linears),
            device="meta",
        )
        joint.weight = _frozen(torch.cat([linear.weight for linear in linears]))
        if joint.bias is not None:
            joint.bias = _frozen(torch.cat([bias_or_zeros(linear) for linear in linears]))
        return joint

    def gated_mlp(self, mlp: Any) -> nn.Module | None:
        """A whole gated MLP from one with gate_proj, up_proj, act_fn and down_proj."""
        gate_up = self.joined([mlp.gate_proj, mlp.up_proj])
        return None if gate_up is None else GatedMlp(gate_up, mlp.act_fn, mlp.down_proj)

    def norm(self, module: nn.Module) -> nn.Module | None:
        """The fast version of a module that is an RMS norm."""
        found = norm_weight(module)
        if found is None:
            return None
        weight, eps = found
        for factor in (weight, 1.0 + weight):
            candidate = RmsNorm(weight, factor, eps)
            if same_output(candidate, module, weight.numel(), weight):
                return candidate
        return None

    def linear(self, linear: nn.Linear) -> nn.Module | None:
        """A faster linear."""
        return None

    def tied_embedding(self, embedding: nn.Embedding, linear: nn.Linear) -> tuple[nn.Module, nn.Module] | None:
        """A faster output linear and the embedding that shares its weight."""
        return None


def bias_or_zeros(linear: nn.Linear) -> Tensor:
    """The bias of a linear, zeros if it has none."""
    bias: Tensor | None = linear.bias
    return linear.weight.new_zeros(linear.out_features) if bias is None else bias


def norm_weight(module: nn.Module) -> tuple[nn.Parameter, float] | None:
    """Weight and eps of a module that may be an RMS norm: one vector as its only parameter, one tensor as input."""
    parameters = dict(module.named_parameters())
    takes_one = len(inspect.signature(module.forward).parameters) == 1
    if list(parameters) != ["weight"] or list(module.children()) or not takes_one:
        return None
    weight = parameters["weight"]
    eps = next((e for name in ("variance_epsilon", "eps") if isinstance(e := getattr(module, name, None), float)), None)
    return None if eps is None or weight.dim() != 1 else (weight, eps)


def same_output(module: nn.Module, original: nn.Module, width: int, like: Tensor) -> bool:
    """Whether two modules agree on a random input [1, 3, width] of the dtype and device of ``like``."""
    sample = noise(1, 3, width, like=like)
    return close(module(sample), original(sample))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
