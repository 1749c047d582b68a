"""Heads in Mistral's native format: ``params.json`` beside ``consolidated*.safetensors``, with names of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.errors import ModelLoadError
from specdec.target.bridge import QueryScale

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
"""Keys of ``params.json`` and what transformers calls them."""

_NAMES = {
    "eagle_linear.": "fc.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
}
"""Parts of Mistral's names and of transformers', for every kind of attention."""


def open_native(
    directory: Path, overrides: Mapping[str, Any], attention: Mapping[str, str], others: Mapping[str, str] | None = None
) -> HeadCheckpoint:
    """Open a checkpoint, with transformers' names for tensors and for keys of the configuration.

    Args:
        directory: the checkpoint.
        overrides: keys of its configuration that shall be otherwise, by transformers' names.
        attention: what follows ``attention.`` in the stored names of the projections and norms of its attention, and
            what follows ``self_attn.`` in transformers', for example ``wq`` and ``q_proj``.
        others: further parts of stored names, dots around them included, and of transformers'.

    Raises:
        ModelLoadError: it cannot be read, or its tensors are quantised, which heads are not computed with.
    """
    names = _NAMES | {f".attention.{old}.": f".self_attn.{new}." for old, new in attention.items()}
    names.update(others or {})

    def named(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    checkpoint = HeadCheckpoint(directory, named)
    checkpoint.config = {_KEYS.get(key, key): value for key, value in checkpoint.config.items()} | dict(overrides)
    if checkpoint.config.get("quantization"):
        raise ModelLoadError(f"{directory}: its weights are quantised; heads are computed with as they are stored")
    if checkpoint.config.get("yarn"):
        checkpoint.config["rope_parameters"] = _yarn(checkpoint.config)
    return checkpoint


def _yarn(config: Mapping[str, Any]) -> dict[str, Any]:
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


def query_scales(checkpoint: HeadCheckpoint) -> dict[int, QueryScale]:
    """By layer, Llama 4's growth of queries with the position, where the configuration asks for it.

    Here it is ``1 + beta * ln(1 + floor(position / original length))``; positions are counted from 0.
    """
    table = checkpoint.config.get("llama_4_scaling")
    if not table:
        return {}
    scale = QueryScale(float(table["original_max_position_embeddings"]), float(table["beta"]), offset=0)
    return dict.fromkeys(range(checkpoint.number_of("layers")), scale)
