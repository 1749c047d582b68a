"""Loads EAGLE heads of Mistral Large 3: layers with multi-head latent attention, a norm behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.head_layouts import PredictionLayout, load_predicting_head
from specdec.drafting.mla import MlaSizes
from specdec.errors import ModelLoadError
from specdec.target.bridge import QueryScale

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.recurrent import FeaturePredictingHead
    from specdec.target.model import TargetModel

_LAYOUT = PredictionLayout(output_norm="norm.weight")

_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
"""Keys of Mistral's ``params.json`` and what transformers calls them."""

_NAMES = {
    "eagle_linear.": "fc.",
    ".attention.wq_a.": ".self_attn.q_a_proj.",
    ".attention.q_a_norm.": ".self_attn.q_a_layernorm.",
    ".attention.wq_b.": ".self_attn.q_b_proj.",
    ".attention.wkv_a_with_mqa.": ".self_attn.kv_a_proj_with_mqa.",
    ".attention.kv_a_norm.": ".self_attn.kv_a_layernorm.",
    ".attention.wkv_b.": ".self_attn.kv_b_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
}
"""Parts of Mistral's names and of transformers'."""


def named(name: str) -> str:
    """The name used here for a stored tensor."""
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def opened(directory: Path, overrides: Mapping[str, Any]) -> HeadCheckpoint:
    """The checkpoint, with transformers' names.

    Raises:
        ModelLoadError: its tensors are quantised, which heads are not computed with.
    """
    checkpoint = HeadCheckpoint(directory, named)
    checkpoint.config = {_KEYS.get(key, key): value for key, value in checkpoint.config.items()} | dict(overrides)
    if checkpoint.config.get("quantization"):
        raise ModelLoadError(f"{directory}: its weights are quantised; heads are computed with as they are stored")
    if checkpoint.config.get("yarn"):
        checkpoint.config["rope_parameters"] = yarn(checkpoint.config)
    return checkpoint


def yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers' description of Mistral's table ``yarn``."""
    table = config["yarn"]
    return {
        "rope_type": "yarn",
        "rope_theta": float(config.get("rope_theta") or 10000.0),
        "factor": float(table["factor"]),
        "original_max_position_embeddings": int(table["original_max_position_embeddings"]),
        "beta_fast": float(table.get("beta", 32)),
        "beta_slow": float(table.get("alpha", 1)),
        "attention_factor": 1.0,
    }


def query_scales(config: Mapping[str, Any], num_layers: int) -> dict[int, QueryScale]:
    """Llama 4's growth of queries with the position, where the configuration asks for it.

    Here it is ``1 + beta * ln(1 + floor(position / original length))``; positions are counted from 0.
    """
    table = config.get("llama_4_scaling")
    if not table:
        return {}
    scale = QueryScale(float(table["original_max_position_embeddings"]), float(table["beta"]), offset=0)
    return dict.fromkeys(range(num_layers), scale)


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
    checkpoint = opened(directory, overrides)
    scales = query_scales(checkpoint.config, checkpoint.number_of("layers"))
    return load_predicting_head(checkpoint, MlaSizes.of(checkpoint), _LAYOUT, target, query_scales=scales)
