"""Loads EAGLE heads of MiniCPM: norms before the fusion, scaled embeddings, residuals and outputs, no norm behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.head_loading import LlamaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel


def renamed(name: str) -> str:
    """The name used here for a stored tensor."""
    return name.removeprefix("model.").replace("eagle_layers.", "layers.")


def load_eagle(directory: Path, overrides: Mapping[str, Any], target: TargetModel) -> FeaturePredictingHead:
    """Load a head.

    Args:
        directory: its checkpoint.
        overrides: keys of its configuration that shall be otherwise.
        target: what it drafts for.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape, or the configuration contradicts them.
        PluginUnsuitableError: the head was made for another target.
    """
    checkpoint = HeadCheckpoint(directory, renamed, overrides=overrides)
    config, sizes = checkpoint.config, LlamaSizes.of(checkpoint)
    layout = PredictionLayout(
        embed_norm="input_norm1.weight",
        hidden_norm="input_norm2.weight",
        embed_scale=float(config.get("scale_emb") or 1.0),
        output_scale=float(checkpoint.require("dim_model_base")) / sizes.hidden_size,
        unused=("norm.weight",),
    )
    added = float(checkpoint.require("scale_depth")) / float(checkpoint.require("mup_denominator")) ** 0.5

    def scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a layer adds is scaled by scaling the linears that add it."""
        last = (".o_proj.weight", ".down_proj.weight")
        return {name: t * added if name.endswith(last) else t for name, t in tensors.items()}

    return load_predicting_head(checkpoint, sizes, layout, target, prepare=scaled)
