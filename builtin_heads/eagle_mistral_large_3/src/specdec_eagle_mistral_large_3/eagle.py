"""Loads EAGLE heads of Mistral Large 3: layers with multi-head latent attention, a norm behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.mistral_format import open_native, query_scales
from specdec.drafting.mla import MlaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_LAYOUT = PredictionLayout(output_norm="norm.weight")

_ATTENTION = {
    "wq_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
}


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
    layers, scales = MlaSizes.of(checkpoint), query_scales(checkpoint)
    return load_predicting_head(checkpoint, layers, _LAYOUT, target, query_scales=scales)
