"""Writes a trained head as a checkpoint that loaders read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specdec.files import save_tensors
from specdec_train.heads.base import TrainableHead


def export(head: TrainableHead, config: dict[str, Any], extra: dict[str, torch.Tensor], folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16).

    Args:
        head: the trained head.
        config: as `TrainableHead.shape` made it, with what else the layout keeps there.
        extra: further tensors of the layout, such as the draft vocabulary's maps, written as they are.
        folder: created if needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in head.tensors().items()}
    save_tensors({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
