"""Loads EAGLE (EAGLE-1 and EAGLE-2) heads with Llama-like layers.

Layouts: the authors' (``fc``, ``layers.0.…`` without an input norm), the same with a table ``model`` in
``config.json`` (``model_type`` ``eagle``), and the older one of the ``speculators`` library (``fusion_fc``,
``transformer.…``), whose heads may have more norms; see `FeaturePrediction` for what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.head_loading import LlamaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_SPECULATORS_NAMES = {
    "fusion_fc.": "fc.",
    "embedding_layernorm.": "embed_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "pre_lm_head_layernorm.": "lm_head_layernorm.",
    "transformer.": "layers.0.",
}
"""Beginnings of names in the speculators library's layout, and of the same tensors in the others."""

_LAYOUT = PredictionLayout(
    embed_norm="embed_layernorm.weight",
    logits_norm="lm_head_layernorm.weight",
    optional=("embed_layernorm.weight",),
    first_norm_required=False,
)


def rename(name: str) -> str | None:
    """The name used here for a stored tensor; None for what is no part of the head."""
    if ".rotary_emb." in name:
        return None
    while name.startswith("model."):
        name = name.removeprefix("model.")
    for old, new in _SPECULATORS_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


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
    checkpoint = HeadCheckpoint(directory, rename, overrides=overrides)
    return load_predicting_head(checkpoint, LlamaSizes.of(checkpoint), _LAYOUT, target)
