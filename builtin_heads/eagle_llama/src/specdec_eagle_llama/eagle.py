"""Loads EAGLE (EAGLE-1 and EAGLE-2) heads with Llama-like layers.

Layouts: the authors' (``fc``, ``layers.0.…`` without an input norm), the same with a table ``model`` in
``config.json`` (``model_type`` ``eagle``), and the older one of the ``speculators`` library (``fusion_fc``, ``transformer.…``), whose
heads may have more norms; see `FeaturePrediction` for what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_loading import (
    LlamaSizes,
    check_target,
    load_vocabulary,
    optional_norm,
    vocabulary_shapes,
    weight_bytes,
)
from specdec.drafting.modules import Rotary, linear, moved
from specdec.drafting.recurrent import FeaturePredictingHead, FeaturePrediction

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.checkpoint import Shape
    from specdec.target.model import TargetModel

_SPECULATORS_NAMES = {
    "fusion_fc.": "fc.",
    "embedding_layernorm.": "embed_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "pre_lm_head_layernorm.": "lm_head_layernorm.",
    "transformer.": "layers.0.",
}
"""Beginnings of names in the speculators library's layout, and of the same tensors in the others."""

_NORMS = ("embed_layernorm.weight", "lm_head_layernorm.weight")


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
    config, sizes = checkpoint.config, LlamaSizes.of(checkpoint)
    width, eps = sizes.hidden_size, sizes.rms_norm_eps
    check_target(
        directory,
        target,
        hidden_size=(width, target.info.hidden_size),
        vocabulary=(int(checkpoint.require("vocab_size")), target.info.vocab_size),
    )
    num_layers = max(1, checkpoint.number_of("layers"))
    required, optional = _shapes(sizes, num_layers)
    optional |= vocabulary_shapes(checkpoint, width, target)
    tensors = moved(checkpoint.take(required, optional), target)
    vocabulary = load_vocabulary(checkpoint, tensors, width, target)
    blocks = [sizes.block(tensors, i) for i in range(num_layers)]
    parts = FeaturePrediction(
        join=linear(tensors["fc.weight"], tensors.get("fc.bias")),
        blocks=blocks,
        rotary=Rotary(config, tensors["fc.weight"]),
        embed_norm=optional_norm(tensors, "embed_layernorm.weight", eps),
        logits_norm=optional_norm(tensors, "lm_head_layernorm.weight", eps),
    )
    return FeaturePredictingHead(parts, vocabulary, memory=weight_bytes(tensors))


def _shapes(sizes: LlamaSizes, num_layers: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Names and shapes of the layers' and the fusion's tensors: those that must be there and those that may."""
    width = sizes.hidden_size
    required: dict[str, Shape] = {"fc.weight": (width, 2 * width)}
    optional: dict[str, Shape] = {"fc.bias": (width,), **dict.fromkeys(_NORMS, (width,))}
    for i in range(num_layers):
        required |= sizes.shapes(f"layers.{i}")
        optional |= sizes.optional_shapes(f"layers.{i}")
        (optional if i == 0 else required)[f"layers.{i}.input_layernorm.weight"] = (width,)
    return required, optional
