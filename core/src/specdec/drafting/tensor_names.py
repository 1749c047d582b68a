"""Names and shapes of the tensors of a checkpoint, without their values: what tells heads from whole models."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Files that may hold weights; of the first pattern that fits all are read."""

Shape = tuple[int, ...]


def tensor_names(checkpoint: Path) -> list[str]:
    """Names of the tensors of a checkpoint; empty when none can be read."""
    return list(tensor_shapes(checkpoint))


def tensor_shapes(checkpoint: Path, patterns: Sequence[str] = WEIGHT_FILES) -> dict[str, Shape]:
    """Shapes of the tensors of a checkpoint by name; empty when none can be read.

    Args:
        checkpoint: its directory.
        patterns: see `WEIGHT_FILES`.
    """
    files = next((found for pattern in patterns if (found := sorted(checkpoint.glob(pattern)))), [])
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes |= _safetensors_shapes(file) if file.suffix == ".safetensors" else _pickled_shapes(file)
    return shapes


def number_of(prefix: str, names: Iterable[str]) -> int:
    """How many entries ``prefix.0.…``, ``prefix.1.…`` there are among names, by the largest index."""
    parts = (name.removeprefix(f"{prefix}.").split(".")[0] for name in names if name.startswith(prefix))
    return max((int(part) + 1 for part in parts if part.isdigit()), default=0)


def _pickled_shapes(file: Path) -> dict[str, Shape]:
    import torch

    try:
        found = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in found.items()}
    except Exception:  # not readable as plain tensors; whoever loads it says why
        return {}


def _safetensors_shapes(file: Path) -> dict[str, Shape]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(size, 100 << 20)))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return {}
