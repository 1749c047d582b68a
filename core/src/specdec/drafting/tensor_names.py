"""Names of the tensors of a checkpoint, without their values: what tells heads from whole models."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def tensor_names(checkpoint: Path) -> list[str]:
    """Names of the tensors of a checkpoint; empty when none can be read."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if files:
        return [name for file in files for name in _safetensors_names(file)]
    names: list[str] = []
    for file in sorted(checkpoint.glob("pytorch_model*.bin")):
        import torch

        try:
            names += list(torch.load(file, map_location="meta", weights_only=True))
        except Exception:  # not readable as plain tensors; whoever loads it says why
            return []
    return names


def _safetensors_names(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(size, 100 << 20)))
    except (OSError, ValueError, struct.error):
        return []
    return [name for name in header if name != "__metadata__"]
