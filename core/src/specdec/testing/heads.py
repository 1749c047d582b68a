"""Tiny random head checkpoints, in whatever layout a test describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def random_tensors(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Random float32 tensors; vectors lie around 1 when their name says norm, else around 0.

    Args:
        shapes: by name.
        seed: fixes the values.
        scale: standard deviation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: tensor + 1.0 if len(tensor.shape) == 1 and "norm" in name else tensor for name, tensor in tensors.items()
    }


def write_head(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    weights: str = "model.safetensors",
    config_file: str = "config.json",
) -> Path:
    """Write a checkpoint directory.

    Args:
        directory: made when absent.
        config: content of the configuration file.
        tensors: by their stored names.
        weights: name of the weight file; anything but ``.safetensors`` is written by `torch.save`.
        config_file: name of the configuration file.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / config_file).write_text(json.dumps(dict(config), indent=2))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if weights.endswith(".safetensors"):
        save_file(stored, path / weights)
    else:
        torch.save(stored, path / weights)
    return path


def vocabulary_map(vocab_size: int, draft_vocab_size: int, *, seed: int = 0) -> dict[str, Tensor]:
    """A random reduced vocabulary as the tensors ``d2t`` (offsets) and ``t2d`` (mask)."""
    import torch

    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    ids = order[:draft_vocab_size].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab_size), "t2d": mask}
