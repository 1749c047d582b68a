"""Writing files that others are to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that whoever may read its folder can read.

    safetensors alone makes files for their owner only, so that a server under another account cannot load what was
    trained or converted for it.

    Args:
        tensors: contiguous, none sharing memory with another.
        path: the file; one that is there is replaced.
        metadata: as safetensors stores it.
    """
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    path.chmod(path.parent.stat().st_mode & 0o666)
