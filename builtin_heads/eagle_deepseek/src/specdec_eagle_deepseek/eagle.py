"""Loads EAGLE heads with DeepSeek layers: norms of embedding and hidden state, and one behind the layers.

The feed-forward part of a layer is dense or a mixture of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.feed_forward import mixtures_of
from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.mla import MlaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_LAYOUT = PredictionLayout(embed_norm="enorm.weight", hidden_norm="hnorm.weight", output_norm="norm.weight")

_V2_ROUTER = {"scoring_func": "softmax", "topk_method": "greedy"}
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""How experts are chosen where a configuration does not say it."""


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
    checkpoint = HeadCheckpoint(directory, lambda name: name.removeprefix("model."), overrides=overrides)
    router = _V2_ROUTER if checkpoint.config.get("model_type") == "deepseek_v2" else _ROUTER
    checkpoint.config = router | {key: value for key, value in checkpoint.config.items() if value is not None}
    layers = MlaSizes.of(checkpoint, mixtures_of(checkpoint, target.info.num_layers))
    return load_predicting_head(checkpoint, layers, _LAYOUT, target)
