"""Loads EAGLE-3 heads: the authors' layout, SGLang's and SpecForge's, and that of the ``speculators`` library.

They differ in the name of the first layer (``midlayer`` or ``layers.0``), in what is stored beside the layer
(embeddings, output linear, draft vocabulary) and in a few switches; see `FeatureFusion` for what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.aux_layers import aux_boundaries
from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_loading import (
    LlamaSizes,
    check_target,
    load_vocabulary,
    vocabulary_shapes,
    weight_bytes,
)
from specdec.drafting.layers import LlamaLayer
from specdec.drafting.modules import Rotary, linear, moved, rms_norm
from specdec.drafting.recurrent import FeatureFusingHead, FeatureFusion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.checkpoint import Shape
    from specdec.target.model import TargetModel


def rename(name: str) -> str | None:
    """The name used here for a stored tensor; None for what is no part of the head."""
    name = name.removeprefix("model.")
    if name.startswith("verifier_") or ".rotary_emb." in name:
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


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
    checkpoint = HeadCheckpoint(directory, rename, overrides=overrides)
    config, shapes, sizes = checkpoint.config, checkpoint.shapes, LlamaSizes.of(checkpoint)
    width, eps = sizes.hidden_size, sizes.rms_norm_eps
    target_width = int(config.get("target_hidden_size") or width)
    check_target(
        directory,
        target,
        hidden_size=(target_width, target.info.hidden_size),
        vocabulary=(int(checkpoint.require("vocab_size")), target.info.vocab_size),
    )
    joins = bool(_setting(config, "use_aux_hidden_state", True))
    count = shapes["fc.weight"][1] // target_width if joins and "fc.weight" in shapes else 1
    num_layers = max(1, checkpoint.number_of("layers"))
    join_norms = _join_norms(config, count, target_width)
    required, optional = _shapes(sizes, num_layers)
    optional |= vocabulary_shapes(checkpoint, width, target)
    if joins:
        required |= {"fc.weight": (width, count * target_width), **join_norms}
        optional["fc.bias"] = (width,)
    unused = [f"layers.{i}.hidden_norm.weight" for i in range(1, num_layers)]
    tensors = moved(checkpoint.take(required, optional, unused=unused), target)
    windows = _windows(config, num_layers)
    boundaries = aux_boundaries(config, target.info.num_layers, count, directory) if joins else ()
    parts = FeatureFusion(
        taps=tuple(boundary - 1 for boundary in boundaries),
        join=linear(tensors["fc.weight"], tensors.get("fc.bias")) if joins else None,
        join_norms=[rms_norm(tensors[name], eps) for name in join_norms],
        embed_norm=rms_norm(tensors["layers.0.input_layernorm.weight"], eps),
        hidden_norm=rms_norm(tensors["layers.0.hidden_norm.weight"], eps),
        first=LlamaLayer(sizes.weights(tensors, "layers.0"), 0, windows[0]),
        blocks=[sizes.block(tensors, i, windows[i]) for i in range(1, num_layers)],
        rotary=Rotary(config, tensors["norm.weight"]),
        norm=rms_norm(tensors["norm.weight"], eps),
        normed_residual=bool(config.get("norm_before_residual", config.get("speculators_model_type") == "eagle3")),
        # Older SpecForge exports say norm_output and mean the norm before the output linear, which is always there;
        # heads that feed the normed output back have a norm for each hidden state.
        normed_feedback=bool(config.get("norm_output")) and "fc_norm.0.weight" in join_norms,
    )
    vocabulary = load_vocabulary(checkpoint, tensors, width, target)
    return FeatureFusingHead(parts, vocabulary, memory=weight_bytes(tensors))


def _shapes(sizes: LlamaSizes, num_layers: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Names and shapes of the layers' and the last norm's tensors: those that must be there and those that may."""
    width = sizes.hidden_size
    required: dict[str, Shape] = {"norm.weight": (width,), "layers.0.hidden_norm.weight": (width,)}
    optional: dict[str, Shape] = {}
    for i in range(num_layers):
        required |= sizes.shapes(f"layers.{i}", 2 * width if i == 0 else None)
        required[f"layers.{i}.input_layernorm.weight"] = (width,)
        optional |= sizes.optional_shapes(f"layers.{i}")
    return required, optional


def _setting(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A key of the configuration or of its table ``eagle_config``."""
    nested = config.get("eagle_config") or {}
    return config.get(key, nested.get(key, default))


def _join_norms(config: Mapping[str, Any], count: int, width: int) -> dict[str, Shape]:
    """The norms before ``fc``: none, one over all hidden states, or one for each."""
    if _setting(config, "fc_norm", False):
        return {f"fc_norm.{i}.weight": (width,) for i in range(count)}
    if _setting(config, "norm_before_fc", False):
        return {"input_norm.weight": (count * width,)}
    return {}


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The sliding window of each layer."""
    kinds = config.get("layer_types") or ()
    window = config.get("sliding_window")
    return [window if i < len(kinds) and kinds[i] == "sliding_attention" else None for i in range(num_layers)]
