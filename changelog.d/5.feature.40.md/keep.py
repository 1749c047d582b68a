"""The fusion passes: each walks the model, and replaces modules by what a kit makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.target.compare import close, noise
from specdec.target.kit import norm_weight, same_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from specdec.target.kit import TorchKit

PROBE_POSITIONS = (0, 3, 41, 2, 517, 1030)
"""Positions of the tokens on which layers are compared; far apart, so that wrong rotations show."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")


def probe_forward(model: Any) -> None:
    """Run a model on a few tokens at `PROBE_POSITIONS`."""
    device = model.get_input_embeddings().weight.device
    positions = torch.tensor([PROBE_POSITIONS], device=device)
    ids = (torch.arange(len(PROBE_POSITIONS), device=device)[None] * 7 + 3) % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=False)


def free(module: nn.Module) -> None:
    """Drop the parameters of a module that has been replaced; others may still refer to the module."""
    for part in module.modules():
        for name in list(part._parameters):
            part._parameters[name] = None


class _JointOutput:
    """One linear for several projections of the same input; remembers its last output until all have taken theirs."""

    def __init__(self, linear: nn.Module, widths: list[int]) -> None:
        self.linear = linear
        self._widths = widths
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Part ``index`` of the outputs for ``x``."""
        if x is not self._input or self._parts[index] is None:
            self._input, self._parts = x, list(self.linear(x).split(self._widths, dim=-1))
        part = self._parts[index]
        assert part is not None
        self._parts[index] = None
        if all(other is None for other in self._parts):
            self._input = None
        return part


class JointProjection(nn.Module):
    """One of the projections that share a linear; called with the input that its siblings get in the same pass."""

    def __init__(self, joint: _JointOutput, index: int) -> None:
        super().__init__()
        if index == 0:
            self.linear = joint.linear
        self._joint = joint
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; a view of the joint output."""
        return self._joint.take(self._index, x)


def join_projections(model: nn.Module, kit: TorchKit) -> int:
    """Compute the query, key and value projections of attention modules with one linear each; how many were joined."""
    count = 0
    for module in list(model.modules()):
        linears: list[Any] = [getattr(module, name, None) for name in _PROJECTIONS]
        joint = kit.joined(linears) if _same_input(linears) else None
        if joint is None:
            continue
        shared = _JointOutput(joint, [linear.out_features for linear in linears])
        parts = [JointProjection(shared, index) for index in range(len(linears))]
        sample = noise(1, 3, linears[0].in_features, like=linears[0].weight)
        if all(close(part(sample), linear(sample)) for part, linear in zip(parts, linears, strict=True)):
            for name, part, linear in zip(_PROJECTIONS, parts, linears, strict=True):
                setattr(module, name, part)
                free(linear)
            count += 1
    return count


def _same_input(linears: list[Any]) -> bool:
    """Whether all are plain linears of one input width and dtype."""
    return all(type(linear) is nn.Linear for linear in linears) and (
        len({(linear.in_features, linear.weight.dtype) for linear in linears}) == 1
    )


def fuse_gated_mlps(model: nn.Module, kit: TorchKit) -> int:
    """Replace gated MLPs by ones with a joint gate and up projection; how many were replaced."""
    count = 0
    for parent, name, mlp in _children(model):
        gate: Any
        up: Any
        gate, up, down = (getattr(mlp, part, None) for part in _GATED)
        if not _same_input([gate, up]) or type(down) is not nn.Linear or not hasattr(mlp, "act_fn"):
            continue
        fused = kit.gated_mlp(mlp)
        if fused is not None and same_output(fused, mlp, gate.in_features, gate.weight):
            setattr(parent, name, fused)
            for part in (gate, up):
                free(part)
            if not any(module is down for module in fused.modules()):
                free(down)
            count += 1
    return count


def replace_norms(model: nn.Module, kit: TorchKit) -> int:
    """Replace RMS norms; how many were replaced."""
    count = 0
    for parent, name, module in _children(model):
        if norm_weight(module) is not None and (fast := kit.norm(module)) is not None:
            setattr(parent, name, fast)
            count += 1
    return count


def replace_linears(model: Any, kit: TorchKit) -> int:
    """Replace the remaining linears; how many were replaced. A linear that shares the embeddings' weight keeps
    sharing."""
    count = 0
    embedding = model.get_input_embeddings()
    table = getattr(embedding, "weight", None)
    for parent, name, linear in _children(model):
        if type(linear) is not nn.Linear:
            continue
        if linear.weight is table:
            count += _replace_tied(model, parent, name, kit)
            continue
        fast = kit.linear(linear)
        if fast is not None and same_output(fast, linear, linear.in_features, linear.weight):
            setattr(parent, name, fast)
            free(linear)
            count += 1
    return count


def _replace_tied(model: Any, parent: nn.Module, name: str, kit: TorchKit) -> int:
    """Replace a linear and the embedding whose weight it shares; both or none."""
    embedding, linear = model.get_input_embeddings(), getattr(parent, name)
    pair = kit.tied_embedding(embedding, linear)
    if pair is None:
        return 0
    fast_linear, fast_embedding = pair
    ids = torch.arange(min(5, embedding.num_embeddings), device=linear.weight.device)[None]
    same = close(fast_embedding(ids), embedding(ids))
    if not same or not same_output(fast_linear, linear, linear.in_features, linear.weight):
        return 0
    setattr(parent, name, fast_linear)
    for owner, child, module in _children(model):
        if module is embedding:
            setattr(owner, child, fast_embedding)
    free(embedding)
    free(linear)
    return 1


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every module below ``model``."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            yield parent, name, module
