"""The architectures of the golden tests, with settings that make their special cases show within 60 tokens."""

from __future__ import annotations

from typing import Any

from specdec.testing import tiny_module

VOCAB = 96

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "gemma3": {"num_hidden_layers": 4, "sliding_window": 9},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 14},
    "gpt2": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    # Query scaling by position starts at position 8192 in the published models; here every 5 positions.
    "llama4": {"attn_temperature_tuning": True, "floor_scale": 5, "attn_scale": 0.3, "attention_chunk_size": 16},
    "gpt_oss": {},
    "cohere2": {"num_hidden_layers": 4},
    "glm4_moe": {},
    "olmo2": {},
    "opt": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "starcoder2": {"sliding_window": 11},
}


def golden_model(architecture: str) -> Any:
    """A random float32 model; the same every time."""
    return tiny_module(architecture, vocab_size=VOCAB, max_position_embeddings=256, **CHANGES[architecture])
