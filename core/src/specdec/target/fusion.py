"""Replaces modules of a transformers model by faster ones that give the same results.

Every pass goes by structure, never by a model's name, and keeps a replacement only after it has reproduced the
original on random input; otherwise the module stays as it was. In order: llama-like decoder layers as straight-line
code (CPU), joint query/key/value and gate/up projections, RMS norms, and every other linear packed for the CPU
kernels. Where the output linear shares its weight with the embeddings, both use the packed copy. Original weights are
freed as they are replaced.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from specdec.target import passes
from specdec.target.kit import TorchKit
from specdec.target.parts import decoder_stack

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.target.fused_stack import FusedStack as FusedStack


def fuse(model: Any) -> list[str]:
    """Fuse what can be fused, in place.

    Args:
        model: a transformers causal language model in evaluation mode whose attention goes through
            `specdec.target.bridge`; called inside ``bridge.using(...)`` of a context without a cache.

    Returns:
        What was done, for the log; empty when nothing fits.
    """
    done: dict[str, int] = {}
    weight = next(model.parameters())
    with torch.no_grad():
        kit = TorchKit()
        if weight.device.type == "cpu":
            from specdec.target.cpu_kit import CpuKit
            from specdec.target.llama_like import fuse_layers

            kit = CpuKit()
            _, layers = decoder_stack(model, model.config.get_text_config().num_hidden_layers)
            done["decoder layers"] = fuse_layers(layers, lambda: passes.probe_forward(model))
        done["joint query/key/value projections"] = passes.join_projections(model, kit)
        done["joint gate/up projections"] = passes.fuse_gated_mlps(model, kit)
        done["RMS norms"] = passes.replace_norms(model, kit)
        done["packed linears"] = passes.replace_linears(model, kit)
    _return_free_memory()
    return [f"{count} {what}" for what, count in done.items() if count]


def _return_free_memory() -> None:
    """Give what the replaced weights took back to the system; glibc keeps freed blocks of this size otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def embedding_weight(model: Any) -> Tensor:
    """The token embedding table [V, H] of a model; when it is packed, unpacked into a fresh tensor."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight.detach()


def __getattr__(name: str) -> Any:
    """`FusedStack` on demand: it needs the compiled CPU kernels."""
    if name != "FusedStack":
        raise AttributeError(name)
    from specdec.target.fused_stack import FusedStack

    return FusedStack
