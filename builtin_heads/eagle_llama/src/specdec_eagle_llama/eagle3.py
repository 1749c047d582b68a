"""Loads EAGLE-3 heads with Llama-like layers, those of Qwen3 with norms of query and key heads included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_layouts import fusing_name, load_fusing_head
from specdec.drafting.head_loading import LlamaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.recurrent import FeatureFusingHead
    from specdec.target.model import TargetModel


def load_eagle3(directory: Path, overrides: Mapping[str, Any], target: TargetModel) -> FeatureFusingHead:
    """Load a head.

    Args:
        directory: its checkpoint.
        overrides: keys of its configuration that shall be otherwise.
        target: what it drafts for.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape, or the configuration contradicts them.
        PluginUnsuitableError: the head was made for another target.
    """
    checkpoint = HeadCheckpoint(directory, fusing_name, overrides=overrides)
    return load_fusing_head(checkpoint, LlamaSizes.of(checkpoint), target)
