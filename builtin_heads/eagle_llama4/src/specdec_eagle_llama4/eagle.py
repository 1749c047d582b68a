"""Loads EAGLE heads with Llama 4 layers: interleaved rotary pairs, norms without weight, layers without rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.head_loading import LlamaSizes, as_rows
from specdec.target.bridge import QueryScale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from specdec.drafting.layers import LlamaWeights
    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_LAYOUT = PredictionLayout(output_norm="norm.weight")


@attrs.frozen(kw_only=True)
class Llama4Sizes(LlamaSizes):
    """Llama 4's layers as Llama-like ones.

    Their norm of queries and keys comes behind the rotation; it has no weight and a rotation keeps lengths, so it may
    come before.
    """

    rotated: Sequence[bool]
    normed: bool

    def weights(self, tensors: Mapping[str, Tensor], prefix: str, mlp: str = "mlp") -> LlamaWeights:
        """The weights of a layer, from tensors of Llama's names."""
        rotates = self.rotated[int(prefix.rsplit(".", 1)[-1])]
        ones = torch.ones_like(tensors["norm.weight"][: self.head_dim]) if self.normed and rotates else None
        plain = LlamaSizes.weights(self, tensors, prefix, mlp)
        return attrs.evolve(plain, rotates=rotates, query_norm=ones, key_norm=ones)


def renamed(name: str) -> str:
    """The name used here for a stored tensor."""
    return name.removeprefix("model.").replace(".feed_forward.", ".mlp.")


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
    config, num_layers = checkpoint.config, max(1, checkpoint.number_of("layers"))
    if config.get("intermediate_size_mlp"):
        checkpoint.config = config = {**config, "intermediate_size": config["intermediate_size_mlp"]}
    rotated = [bool(flag) for flag in config.get("no_rope_layers") or [1] * num_layers][:num_layers]
    plain = LlamaSizes.of(checkpoint)
    sizes = Llama4Sizes(**attrs.asdict(plain), rotated=rotated, normed=bool(config.get("use_qk_norm", True)))

    def in_halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = (".q_proj.weight", ".k_proj.weight")
        return {name: as_rows(t, sizes.head_dim) if name.endswith(turned) else t for name, t in tensors.items()}

    scales: dict[int, QueryScale] = {}
    if config.get("attn_temperature_tuning", True):
        scale = QueryScale(float(config.get("floor_scale") or 8192), float(config.get("attn_scale") or 0.1))
        scales = {i: scale for i, rotates in enumerate(rotated) if not rotates}
    return load_predicting_head(checkpoint, sizes, _LAYOUT, target, prepare=in_halves, query_scales=scales)
