"""Tiny random checkpoints by architecture name: they load in milliseconds and run anywhere.

Weights are random but fixed by a seed, with biases and norm weights away from their usual 0 and 1, so that a pass which
forgets one of them is seen. Logits have a standard deviation of about 1, so that greedy choices are rarely near ties.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.testing.tokenizers import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": _MOE,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "attention_chunk_size": 16,
        "num_hidden_layers": 4,
    },
    "gpt2": {"n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "cohere2": {"sliding_window": 8, "logit_scale": 1.0},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
}

_ALIASES = {"gemma3": "gemma3_text", "llama4": "llama4_text"}

ARCHITECTURES: tuple[str, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "olmo2",
    "granite",
    "starcoder2",
    "cohere2",
    "exaone4",
    "ernie4_5",
    "smollm3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama4",
)
"""Architectures that `tiny_model` is tested with; any other `model_type` of transformers may work too."""


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """The transformers configuration of a tiny model.

    Args:
        architecture: a `model_type` of transformers; 'gemma3' and 'llama4' stand for their text models.
        overrides: fields of the configuration class: ``vocab_size``, ``hidden_size``, ``num_hidden_layers``, …

    Raises:
        ValueError: transformers has no such architecture.
    """
    from transformers import AutoConfig

    model_type = _ALIASES.get(architecture, architecture)
    fields = {**_BASE, **_SPECIAL.get(model_type, {}), **overrides}
    return AutoConfig.for_model(model_type, **fields)


def tiny_module(architecture: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random causal language model in memory: float32, evaluation mode.

    Args:
        architecture: as for `tiny_config`.
        seed: fixes the weights; the global random state of torch is left as it was.
        overrides: as for `tiny_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(architecture, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_model(architecture: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random checkpoint with a tokenizer, which loads like any Hugging Face directory.

    Args:
        architecture: as for `tiny_config`.
        path: directory to write; made when absent.
        seed: fixes the weights.
        overrides: as for `tiny_config`.

    Returns:
        The directory: ``config.json``, ``model.safetensors``, ``generation_config.json``, and a tokenizer with a chat
        template whose ids all lie below ``vocab_size``.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    model = tiny_module(architecture, seed=seed, **overrides)
    with _no_progress_bars():
        model.save_pretrained(directory)
    text_config = model.config.get_text_config()
    tiny_tokenizer(text_config.vocab_size).save_pretrained(directory)
    return directory


def load_module(path: str | Path) -> Any:
    """A checkpoint as a plain transformers model, in float32 and evaluation mode, to compare an engine with."""
    import torch
    from transformers import AutoModelForCausalLM

    with _no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def set_eos(path: str | Path, eos_token_ids: int | list[int] | None) -> None:
    """Declare other end-of-sequence ids for a written checkpoint.

    Random weights hardly ever emit a given id; run greedily once, then declare an emitted token to be the end.

    Args:
        path: directory written by `tiny_model`.
        eos_token_ids: one id, several, or None for a model without an end token.
    """
    for name in ("config.json", "generation_config.json"):
        file = Path(path) / name
        if file.exists():
            content = json.loads(file.read_text())
            content["eos_token_id"] = eos_token_ids
            file.write_text(json.dumps(content, indent=2))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
