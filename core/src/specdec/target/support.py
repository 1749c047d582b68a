"""Whether an architecture can be a target, as far as its configuration and class say; needs no weights."""

from __future__ import annotations

from typing import Any

from specdec.errors import UnsupportedModelError

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Names in ``config.layer_types`` of layers that keep K/V and nothing else."""


def architecture_reasons(config: Any, model_class: type) -> list[str]:
    """Every reason why models of a class cannot run over packed tokens and a paged cache.

    Args:
        config: transformers configuration of the text part.
        model_class: the class that would be loaded.

    Returns:
        Sentences; empty when nothing speaks against it.
    """
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model; targets are decoder-only")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES)
    if other:
        reasons.append(
            f"it has layers of type {', '.join(map(repr, other))}, "
            "which keep a state other than keys and values per token"
        )
    elif getattr(model_class, "_is_stateful", False):
        reasons.append("it has recurrent layers, which keep a state that specdec cannot roll back")
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        reasons.append(
            "its attention cannot be replaced: the class does not go through transformers' attention interface "
            "(ALiBi and other older architectures compute it themselves)"
        )
    if getattr(config, "alibi", False):
        reasons.append("it uses ALiBi position biases, which attention backends do not know")
    if not getattr(config, "is_causal", True):
        reasons.append("its attention is bidirectional")
    return reasons


def refuse(name: str, model_type: str, reasons: list[str]) -> UnsupportedModelError:
    """The error that lists every reason why ``name`` cannot be a target."""
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return UnsupportedModelError(f"{name!r} (model_type {model_type!r}) cannot be a target:{listed}", reasons=reasons)
