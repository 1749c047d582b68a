"""Loads heads of both dataflows from checkpoints whose layers some reader knows (`LayerReader`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec.drafting.aux_layers import aux_boundaries
from specdec.drafting.base import MaskRow
from specdec.drafting.checkpoint import check_sizes
from specdec.drafting.head_loading import (
    load_vocabulary,
    optional_norm,
    vocabulary_shapes,
    weight_bytes,
)
from specdec.drafting.modules import Rotary, linear, moved, rms_norm
from specdec.drafting.parallel import MASK_TOKEN_KEYS
from specdec.drafting.recurrent import Block, FeatureFusingHead, FeatureFusion, FeaturePredictingHead, FeaturePrediction
from specdec.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from specdec.drafting.checkpoint import HeadCheckpoint, Shape
    from specdec.drafting.recurrent import DraftLayer
    from specdec.target.bridge import QueryScale
    from specdec.target.model import TargetModel


class LayerReader(Protocol):
    """Knows the tensors of one kind of decoder layer, for example `specdec.drafting.head_loading.LlamaSizes`."""

    @property
    def hidden_size(self) -> int:
        """Width of the head's hidden states."""

    @property
    def eps(self) -> float:
        """Of all norms."""

    def shapes(self, prefix: str, input_width: int | None = None) -> dict[str, Shape]:
        """Names and shapes of a layer's required tensors but for the input norm."""

    def optional_shapes(self, prefix: str) -> dict[str, Shape]:
        """Names and shapes of tensors that a layer may have."""

    def layer(self, tensors: Mapping[str, Tensor], prefix: str, index: int, window: int | None = None) -> DraftLayer:
        """The layer behind its input norm."""

    def rotary(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys for `Rotary`."""


# --- heads that predict the final hidden state (EAGLE) ------------------------------------------------


@frozen(kw_only=True)
class PredictionLayout:
    """How a head that predicts hidden states is stored, and what differs around its layers."""

    embed_norm: str | None = None
    """Name of the norm of the embeddings; None: they are taken as they are."""
    hidden_norm: str | None = None
    """Name of the norm of the hidden states."""
    output_norm: str | None = None
    """Name of the norm behind the layers."""
    optional: tuple[str, ...] = ()
    """Which of these norms may be missing."""
    logits_norm: str | None = None
    """Name of a norm before the output linear alone, which may be missing."""
    first_norm_required: bool = True
    """Whether the first layer has an input norm; if not, it may have one."""
    embed_scale: float = 1.0
    output_scale: float = 1.0
    unused: tuple[str, ...] = ()
    """Tensors that may be stored and mean nothing."""


def load_predicting_head(
    checkpoint: HeadCheckpoint,
    layers: LayerReader,
    layout: PredictionLayout,
    target: TargetModel,
    *,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
    query_scales: Mapping[int, QueryScale] | None = None,
) -> FeaturePredictingHead:
    """Load a head (`FeaturePrediction`); the joining linear is ``fc``, layers are ``layers.0`` and so on.

    Args:
        checkpoint: opened with names like these.
        layers: reads its layers.
        layout: what differs.
        target: what it drafts for.
        prepare: gets all tensors after the check, in the dtype to compute in, and returns them in the order of rows and
            at the scale that `layers` takes them.
        query_scales: layers whose queries are scaled by position.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape, or the configuration contradicts them.
        PluginUnsuitableError: the head was made for another target.
    """
    width, eps = layers.hidden_size, layers.eps
    checkpoint.require("vocab_size")
    check_sizes(checkpoint.directory, checkpoint.config, target.info)
    num_layers = max(1, checkpoint.number_of("layers"))
    required: dict[str, Shape] = {"fc.weight": (width, 2 * width)}
    optional: dict[str, Shape] = {"fc.bias": (width,), **vocabulary_shapes(checkpoint, width, target)}
    for name in (layout.embed_norm, layout.hidden_norm, layout.output_norm):
        if name is not None:
            (optional if name in layout.optional else required)[name] = (width,)
    if layout.logits_norm is not None:
        optional[layout.logits_norm] = (width,)
    for i in range(num_layers):
        required |= layers.shapes(f"layers.{i}")
        optional |= layers.optional_shapes(f"layers.{i}")
        has_norm = i > 0 or layout.first_norm_required
        (required if has_norm else optional)[f"layers.{i}.input_layernorm.weight"] = (width,)
    tensors = prepare(moved(checkpoint.take(required, optional, unused=layout.unused), target))
    parts = FeaturePrediction(
        join=linear(tensors["fc.weight"], tensors.get("fc.bias")),
        blocks=[_block(layers, tensors, i) for i in range(num_layers)],
        rotary=Rotary(layers.rotary(checkpoint.config), tensors["fc.weight"]),
        embed_norm=optional_norm(tensors, layout.embed_norm, eps),
        hidden_norm=optional_norm(tensors, layout.hidden_norm, eps),
        output_norm=optional_norm(tensors, layout.output_norm, eps),
        logits_norm=optional_norm(tensors, layout.logits_norm, eps),
        embed_scale=layout.embed_scale,
        output_scale=layout.output_scale,
    )
    vocabulary = load_vocabulary(checkpoint, tensors, width, target)
    return FeaturePredictingHead(parts, vocabulary, query_scales, weight_bytes(tensors))


def _block(layers: LayerReader, tensors: Mapping[str, Tensor], index: int, window: int | None = None) -> Block:
    prefix = f"layers.{index}"
    norm = optional_norm(tensors, f"{prefix}.input_layernorm.weight", layers.eps)
    return Block(layers.layer(tensors, prefix, index, window), norm)


# --- heads that fuse hidden states of several layers (EAGLE-3) ----------------------------------------

_MASK_STATES = "mask_hidden"
"""[1, 1, n H]: what the rows of draft tokens take in place of the target's hidden states, in heads with such rows."""


def fusing_name(name: str) -> str | None:
    """`load_fusing_head`'s name for a stored tensor; None for what is no part of the head."""
    name = name.removeprefix("model.")
    if name.startswith("verifier_") or ".rotary_emb." in name:
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def load_fusing_head(checkpoint: HeadCheckpoint, layers: LayerReader, target: TargetModel) -> FeatureFusingHead:
    """Load a head (`FeatureFusion`).

    Layouts (`fusing_name` gives them the same names): the authors' and SGLang's (``midlayer``), that of the
    ``speculators`` library (``layers.0``). What differs otherwise are switches of the configuration, and what is stored
    beside the layers. A head with a tensor ``mask_hidden`` drafts in parallel (P-EAGLE), unless its configuration says
    no.

    Args:
        checkpoint: opened with `fusing_name`.
        layers: reads its layers.
        target: what it drafts for.

    Raises:
        ModelLoadError: tensors are missing, surplus or of another shape, or the configuration contradicts them.
        PluginUnsuitableError: the head was made for another target.
    """
    config, shapes, directory = checkpoint.config, checkpoint.shapes, checkpoint.directory
    width, eps = layers.hidden_size, layers.eps
    target_width = int(config.get("target_hidden_size") or width)
    checkpoint.require("vocab_size")
    check_sizes(directory, config, target.info)
    joins = bool(_setting(config, "use_aux_hidden_state", True))
    count = shapes["fc.weight"][1] // target_width if joins and "fc.weight" in shapes else 1
    num_layers = max(1, checkpoint.number_of("layers"))
    join_norms = _join_norms(config, count, target_width)
    required, optional = _fusing_shapes(layers, num_layers)
    optional |= vocabulary_shapes(checkpoint, width, target)
    if joins:
        required |= {"fc.weight": (width, count * target_width), **join_norms}
        optional["fc.bias"] = (width,)
    unused = [f"layers.{i}.hidden_norm.weight" for i in range(1, num_layers)]
    mask = _mask_token_id(checkpoint, target.info.vocab_size) if _in_parallel(checkpoint) else None
    if mask is None:
        unused.append(_MASK_STATES)
    else:
        required[_MASK_STATES] = _mask_shape(shapes.get(_MASK_STATES), count * target_width)
    tensors = moved(checkpoint.take(required, optional, unused=unused), target)
    windows = _windows(config, num_layers)
    boundaries = aux_boundaries(config, target.info.num_layers, count, directory) if joins else ()
    parts = FeatureFusion(
        taps=tuple(boundary - 1 for boundary in boundaries),
        join=linear(tensors["fc.weight"], tensors.get("fc.bias")) if joins else None,
        join_norms=[rms_norm(tensors[name], eps) for name in join_norms],
        embed_norm=rms_norm(tensors["layers.0.input_layernorm.weight"], eps),
        hidden_norm=rms_norm(tensors["layers.0.hidden_norm.weight"], eps),
        first=layers.layer(tensors, "layers.0", 0, windows[0]),
        blocks=[_block(layers, tensors, i, windows[i]) for i in range(1, num_layers)],
        rotary=Rotary(layers.rotary(config), tensors["norm.weight"]),
        norm=rms_norm(tensors["norm.weight"], eps),
        normed_residual=bool(config.get("norm_before_residual", config.get("speculators_model_type") == "eagle3")),
        # Older SpecForge exports say norm_output and mean the norm before the output linear, which is always there;
        # heads that feed the normed output back have a norm for each hidden state.
        normed_feedback=bool(config.get("norm_output")) and "fc_norm.0.weight" in join_norms,
        mask_row=None if mask is None else MaskRow(mask, tensors[_MASK_STATES].view(1, -1).chunk(count, -1)),
    )
    vocabulary = load_vocabulary(checkpoint, tensors, width, target)
    return FeatureFusingHead(parts, vocabulary, memory=weight_bytes(tensors))


def _in_parallel(checkpoint: HeadCheckpoint) -> bool:
    """Whether all draft tokens come from one pass: by the switch, else by the kind of head, else by what is stored."""
    config = checkpoint.config
    switch = config.get("parallel_drafting")
    if switch is not None:
        return bool(switch)
    return config.get("speculators_model_type") == "peagle" or _MASK_STATES in checkpoint.shapes


def _mask_token_id(checkpoint: HeadCheckpoint, vocab_size: int) -> int:
    """The mask id of a head that drafts in parallel.

    Raises:
        ModelLoadError: the id or the hidden states of the mask are missing, or the id is no token's.
    """
    keys = (*MASK_TOKEN_KEYS, "mask_token_id")
    found = next((checkpoint.config[key] for key in keys if checkpoint.config.get(key) is not None), None)
    missing = ["mask token id in its configuration (" + ", ".join(keys) + ")"] if found is None else []
    if _MASK_STATES not in checkpoint.shapes:
        missing.append(f"tensor {_MASK_STATES!r}")
    if missing:
        raise ModelLoadError(
            f"{checkpoint.directory}: to draft all tokens in one pass (P-EAGLE), a head needs what this one lacks: it "
            f"has no {' and no '.join(missing)}; give the id in speculative.head_config if you know it, or set "
            "speculative.parallel_drafting = false to draft one token after another"
        )
    if type(found) is not int or not 0 <= found < vocab_size:
        raise ModelLoadError(
            f"{checkpoint.directory}: the mask token id {found!r} in its configuration lies outside the vocabulary of "
            f"{vocab_size} ids"
        )
    return found


def _mask_shape(stored: Shape | None, width: int) -> Shape:
    """The shape to expect of `_MASK_STATES`: one vector, however many leading ones it has."""
    return stored if stored and stored == (*(1,) * (len(stored) - 1), width) else (1, 1, width)


def _fusing_shapes(layers: LayerReader, num_layers: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Names and shapes of the layers' and the last norm's tensors: those that must be there and those that may."""
    width = layers.hidden_size
    required: dict[str, Shape] = {"norm.weight": (width,), "layers.0.hidden_norm.weight": (width,)}
    optional: dict[str, Shape] = {}
    for i in range(num_layers):
        required |= layers.shapes(f"layers.{i}", 2 * width if i == 0 else None)
        required[f"layers.{i}.input_layernorm.weight"] = (width,)
        optional |= layers.optional_shapes(f"layers.{i}")
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
