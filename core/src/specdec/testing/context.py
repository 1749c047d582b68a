"""An engine's facts without an engine."""

from __future__ import annotations

from typing import Any

from specdec.types import EngineContext, TargetInfo


def engine_context(**overrides: Any) -> EngineContext:
    """The `EngineContext` of an engine for a tiny model on the CPU, to build plugins with.

    Args:
        overrides: fields of `EngineContext`; fields of `TargetInfo` go to ``target_info``.
    """
    info: dict[str, Any] = {
        "model": "tiny",
        "model_type": "llama",
        "path": None,
        "hf_config": None,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "max_position_embeddings": 128,
        "eos_token_ids": (),
    }
    info |= {name: overrides.pop(name) for name in list(overrides) if name in info}
    fields: dict[str, Any] = {
        "target_info": TargetInfo(**info),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "num_speculative_tokens": 4,
        "block_size": 4,
        "seed": 0,
    }
    return EngineContext(**(fields | overrides))
