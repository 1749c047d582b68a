"""Loads MLP speculators (Wertheimer et al. 2024) and computes with them.

From the state s behind which the newest token x was sampled, step i gives::

    s = gelu(ln_i(a * proj_i(s) + b * emb_i(x)));   logits = head_i(s);   x is then the token drafted from them

with a = 0.5^(0.5 / n) and b = sqrt(1 - a^2) * sqrt(d / 2) for n steps and inner width d. The norm divides by the root
mean square (no mean is subtracted), and has a weight and a bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.drafting.checkpoint import HeadCheckpoint, check_target
from specdec.drafting.modules import linear, moved
from specdec.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from specdec.drafting.checkpoint import Shape
    from specdec.target.model import TargetModel
    from specdec.types import TargetInfo

EPS = 1e-6


def normalized(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Divide [..., width] by its root mean square, then apply weight and bias."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    x = wide.to(x.dtype)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


class Step(nn.Module):
    """One step of the recurrence; what steps share is the same module in each."""

    def __init__(
        self, projection: nn.Module, table: Tensor, weight: Tensor, bias: Tensor, output: nn.Module, *, steps: int
    ) -> None:
        """Hold a step's weights.

        Args:
            projection: linear [d, width of the state].
            table: [V, d], embeddings.
            weight: [d], of the norm.
            bias: [d], of the norm.
            output: linear [V, d].
            steps: of the whole network.
        """
        super().__init__()
        self._projection, self._output = projection, output
        self._table, self._weight, self._bias = table, weight, bias
        self._state_factor = 0.5 ** (0.5 / steps)
        self._token_factor = ((1 - self._state_factor**2) * table.shape[1] / 2) ** 0.5

    def forward(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """[T, width], int64 [T] -> states [T, d]."""
        embedded = nn.functional.embedding(token_ids, self._table)
        mixed = self._state_factor * self._projection(states) + self._token_factor * embedded
        return nn.functional.gelu(normalized(mixed, self._weight, self._bias))

    def logits(self, states: Tensor) -> Tensor:
        """[T, d] -> [T, V]."""
        result: Tensor = self._output(states)
        return result


class MlpSpeculator:
    """The steps, and how the target's hidden states enter the first."""

    def __init__(self, steps: Sequence[Step], *, scale_input: bool, num_bytes: int) -> None:
        """Put a network together.

        Args:
            steps: in order.
            scale_input: whether hidden states are normalised, and divided by the root of 2.
            num_bytes: of the weights.
        """
        self.steps = tuple(steps)
        self.num_bytes = num_bytes
        self._scale_input = scale_input

    def begin(self, hidden_states: Tensor) -> Tensor:
        """Final hidden states [A, H] -> the first states [A, H]."""
        return normalized(hidden_states) / 2**0.5 if self._scale_input else hidden_states


def check_network(directory: Path, config: Mapping[str, Any], info: TargetInfo) -> int:
    """Refuse a speculator whose configuration has sizes of another target.

    Returns:
        The width of the hidden states it takes.

    Raises:
        ModelLoadError: the configuration does not say the width.
        PluginUnsuitableError: both sizes are named.
    """
    width = config.get("emb_dim") or config.get("hidden_size")
    if not width:
        raise ModelLoadError(f"{directory}: its configuration has no 'emb_dim'")
    stored = int(config.get("vocab_size") or info.vocab_size)
    check_target(directory, info, hidden_size=(int(width), info.hidden_size), vocabulary=(stored, info.vocab_size))
    return int(width)


def load_network(directory: Path, target: TargetModel) -> MlpSpeculator:
    """Load a speculator.

    Heads for Llama and Granite differ in two switches: with ``tie_weights`` all steps share embeddings, norm and output
    linear, and all but the first the projection; files store what is shared once or for every step. With
    ``scale_input`` the hidden states are normalised first.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape.
        PluginUnsuitableError: it was made for another target.
    """
    checkpoint = HeadCheckpoint(directory, lambda name: name.removeprefix("speculator."))
    config, info = checkpoint.config, target.info
    width = check_network(directory, config, info)
    inner, count = int(config.get("inner_dim") or width), int(checkpoint.require("n_predict"))
    shapes = [_shapes(i, width, inner, info.vocab_size) for i in range(count)]
    tied = bool(config.get("tie_weights"))
    required: dict[str, Shape] = {}
    optional: dict[str, Shape] = {}
    for i, step in enumerate(shapes):
        for name, shape in step.items():
            is_shared = tied and i > (1 if name.startswith("proj.") else 0)
            (optional if is_shared else required)[name] = shape
    tensors = moved(checkpoint.take(required, optional), target)
    return MlpSpeculator(
        _steps(tensors, count),
        scale_input=bool(config.get("scale_input")),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _shapes(step: int, width: int, inner: int, vocab_size: int) -> dict[str, Shape]:
    return {
        f"emb.{step}.weight": (vocab_size, inner),
        f"proj.{step}.weight": (inner, inner if step else width),
        f"head.{step}.weight": (vocab_size, inner),
        f"ln.{step}.weight": (inner,),
        f"ln.{step}.bias": (inner,),
    }


def _steps(tensors: Mapping[str, Tensor], count: int) -> list[Step]:
    """The steps; one that lacks a tensor shares it with the last one before that has it, as a module."""
    linears: dict[str, nn.Module] = {}

    def latest(part: str, i: int, end: str = "weight") -> str:
        return next(name for j in range(i, -1, -1) if (name := f"{part}.{j}.{end}") in tensors)

    def module(name: str) -> nn.Module:
        if name not in linears:
            linears[name] = linear(tensors[name])
        return linears[name]

    return [
        Step(
            module(latest("proj", i)),
            tensors[latest("emb", i)],
            tensors[latest("ln", i)],
            tensors[latest("ln", i, "bias")],
            module(latest("head", i)),
            steps=count,
        )
        for i in range(count)
    ]
