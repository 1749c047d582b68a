"""Loads EAGLE heads of Mistral Large 3: layers with multi-head latent attention, a norm behind them.

The feed-forward part of a layer is dense or a mixture of experts, as the table ``moe`` of ``params.json`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.drafting.feed_forward import mixtures_of
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

_EXPERTS = {
    ".gate.": ".mlp.gate.",
    ".experts.": ".mlp.experts.",
    ".shared_experts.": ".mlp.shared_experts.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}

_MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
}
"""Keys of the table ``moe`` and what DeepSeek's configurations call them."""

_ROUTER = {"scoring_func": "softmax", "topk_method": "group_limited_greedy", "norm_topk_prob": True}
"""What the table does not say, in DeepSeek's words."""


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
    checkpoint = open_native(directory, overrides, _ATTENTION, _EXPERTS)
    table = checkpoint.config.get("moe") or {}
    named = {_MOE_KEYS[key]: value for key, value in table.items() if key in _MOE_KEYS}
    checkpoint.config = _ROUTER | named | checkpoint.config
    layers = MlaSizes.of(checkpoint, mixtures_of(checkpoint, target.info.num_layers))
    return load_predicting_head(checkpoint, layers, _LAYOUT, target, query_scales=query_scales(checkpoint))
