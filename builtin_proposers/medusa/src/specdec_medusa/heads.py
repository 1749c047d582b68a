"""Loads Medusa heads and computes with them.

Head i sees the final hidden state f behind which the newest token was sampled, and predicts the i-th token after that::

    x = f;  x = x + silu(W_ij x + b_ij) for each of its blocks j;  logits = output_i(x)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.drafting.checkpoint import HeadCheckpoint, check_target, read_head_config
from specdec.drafting.modules import linear, moved, target_output, target_output_rows
from specdec.drafting.tensor_names import number_of, tensor_shapes
from specdec.drafting.vocabulary import target_ids_of
from specdec.errors import ModelLoadError
from specdec.types import Identification

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from specdec.drafting.checkpoint import Shape
    from specdec.target.model import TargetModel
    from specdec.types import TargetInfo

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors", "pytorch_model*.bin")

_INSIDE_MODEL = "medusa_head."
"""Beginning of the heads' names in checkpoints that hold the target as well."""

_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"outputs.\1.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"outputs.\1.weight"),
    (re.compile(r"lm_head\.weight"), "output.weight"),
)
"""Stored names (the authors', vLLM's) and those used here."""


class MedusaHeads:
    """Several heads on one hidden state."""

    def __init__(
        self, blocks: Sequence[Sequence[nn.Module]], outputs: Sequence[nn.Module], target_ids: Tensor | None
    ) -> None:
        """Put heads together.

        Args:
            blocks: linears [H, H] of each head.
            outputs: linears [V_draft, H], one for each head, or one that all share.
            target_ids: int64 [V_draft] of a reduced vocabulary.
        """
        self._blocks, self._outputs = blocks, outputs
        self.target_ids = target_ids

    def __len__(self) -> int:
        return len(self._blocks)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def logits(self, hidden_states: Tensor, count: int) -> list[Tensor]:
        """[A, H] -> [A, V_draft] from each of the first ``count`` heads."""
        states = []
        for blocks in self._blocks[:count]:
            x = hidden_states
            for block in blocks:
                x = x + nn.functional.silu(block(x))
            states.append(x)
        if len(self._outputs) > 1:
            return [output(x) for output, x in zip(self._outputs, states, strict=False)]
        return list(self._outputs[0](torch.cat(states)).chunk(len(states)))


def load_heads(directory: Path, target: TargetModel) -> tuple[MedusaHeads, int]:
    """Load heads.

    Layouts: the authors' (``0.0.linear.weight``, ``0.1.weight``, …; alone, or as ``medusa_head.…`` beside the target's
    own tensors), heads without output linears (the target's is used), and vLLM's (``blocks.0.layers.0.weight``,
    ``lm_heads.0.weight`` or one ``lm_head.weight`` for all). How many heads and blocks there are the tensors say. A
    reduced vocabulary is given by ``token_map`` (target ids) or ``d2t`` (offsets).

    Returns:
        The heads, and the bytes of their own weights.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape.
        PluginUnsuitableError: the heads were made for another target.
    """
    checkpoint = HeadCheckpoint(directory, _renaming(directory), WEIGHT_FILES)
    shapes, info = checkpoint.shapes, target.info
    num_heads = checkpoint.number_of("blocks")
    width = _checked_width(directory, checkpoint.config, shapes, info)
    num_blocks = [checkpoint.number_of(f"blocks.{i}") for i in range(num_heads)]
    mapped = next((shapes[name][0] for name in ("d2t", "token_map") if name in shapes), None)
    required, optional = _shapes(num_blocks, width)
    names = [f"outputs.{i}.weight" for i in range(num_heads)]
    names = names if any(name in shapes for name in names) else [name for name in ("output.weight",) if name in shapes]
    required |= dict.fromkeys(names, (mapped or info.vocab_size, width))
    optional |= dict.fromkeys(("d2t", "token_map"), (mapped or info.vocab_size,))
    tensors = moved(checkpoint.take(required, optional | {"t2d": shapes.get("t2d", ())}), target)
    target_ids = target_ids_of(tensors, mapped or info.vocab_size, info.vocab_size, directory)
    outputs = [linear(tensors[name]) for name in names] or [
        target_output(target) if target_ids is None else linear(target_output_rows(target, target_ids))
    ]
    blocks = [
        [linear(tensors[f"blocks.{i}.{j}.weight"], tensors.get(f"blocks.{i}.{j}.bias")) for j in range(count)]
        for i, count in enumerate(num_blocks)
    ]
    ids = None if target_ids is None else target_ids.to(target.device)
    return MedusaHeads(blocks, outputs, ids), sum(tensor.nbytes for tensor in tensors.values())


def check_heads(directory: Path, info: TargetInfo) -> int:
    """Refuse heads of another target by the shapes of their tensors, which are not read.

    Returns:
        How many heads there are.

    Raises:
        ModelLoadError: there are no heads.
        PluginUnsuitableError: they were made for another target.
    """
    rename = _renaming(directory)
    stored = tensor_shapes(directory, WEIGHT_FILES)
    shapes = {named: shape for name, shape in stored.items() if (named := rename(name)) is not None}
    _checked_width(directory, read_head_config(directory), shapes, info)
    return number_of("blocks", shapes)


def identified(directory: Path) -> Identification:
    """Of a directory whose ``config.json`` is that of Medusa heads: whether there is a whole model beside them."""
    names = list(tensor_shapes(directory))
    inside = [name for name in names if name.startswith(_INSIDE_MODEL)]
    return Identification(
        method="medusa",
        reason="its config.json is that of Medusa heads",
        language_model=bool(inside) and len(inside) < len(names),
    )


def _checked_width(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, Shape], info: TargetInfo) -> int:
    """The width of the hidden states that heads take, after a check that the target has as many."""
    width = next((shape[1] for name, shape in shapes.items() if name.startswith("blocks.") and len(shape) == 2), None)
    if width is None:
        raise ModelLoadError(f"{directory}: holds no Medusa heads (no tensor like '0.0.linear.weight')")
    stored = int(config.get("vocab_size") or info.vocab_size)
    check_target(directory, info, hidden_size=(width, info.hidden_size), vocabulary=(stored, info.vocab_size))
    return width


def _shapes(num_blocks: Sequence[int], width: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Names and shapes of the blocks' tensors: those that must be there and those that may."""
    places = [f"blocks.{i}.{j}" for i, count in enumerate(num_blocks) for j in range(count)]
    weights: dict[str, Shape] = {f"{place}.weight": (width, width) for place in places}
    biases: dict[str, Shape] = {f"{place}.bias": (width,) for place in places}
    return weights, biases


def _renaming(directory: Path) -> Callable[[str], str | None]:
    """Gives the names used here; where heads lie beside the target's tensors, only the heads'."""
    inside = any(name.startswith(_INSIDE_MODEL) for name in tensor_shapes(directory))

    def rename(name: str) -> str | None:
        if inside and not name.startswith(_INSIDE_MODEL):
            return None
        name = name.removeprefix(_INSIDE_MODEL).removeprefix("medusa_heads.")
        for pattern, new in _NAMES:
            if pattern.fullmatch(name):
                return pattern.sub(new, name)
        return name

    return rename
