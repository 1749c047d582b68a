"""Loads EAGLE heads in the native Mistral format: layers with an input norm, a norm behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.head_loading import LlamaSizes, as_rows
from specdec.drafting.mistral_format import open_native, query_scales

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_LAYOUT = PredictionLayout(output_norm="norm.weight")

_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj"}


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
    checkpoint = open_native(directory, overrides, _ATTENTION)
    sizes = LlamaSizes.of(checkpoint)

    def in_halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = (".q_proj.weight", ".k_proj.weight")
        return {name: as_rows(t, sizes.head_dim) if name.endswith(turned) else t for name, t in tensors.items()}

    scales = query_scales(checkpoint)
    return load_predicting_head(checkpoint, sizes, _LAYOUT, target, prepare=in_halves, query_scales=scales)
