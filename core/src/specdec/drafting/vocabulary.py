"""Reduced draft vocabularies: which target ids the rows of a head's output linear stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def target_ids_of(tensors: Mapping[str, Tensor], size: int, vocab_size: int, directory: Path) -> Tensor | None:
    """The target id of every draft id.

    Args:
        tensors: what the checkpoint has of ``d2t`` (int64 [size], target id minus draft id), ``t2d`` (bool [V'], which
            target ids the draft vocabulary has; checked against ``d2t``) and ``token_map`` (int64 [size], target ids).
        size: of the draft vocabulary.
        vocab_size: the target's.
        directory: the checkpoint, for messages.

    Returns:
        int64 [size], or None when both vocabularies are the same.

    Raises:
        ModelLoadError: a reduced vocabulary without a map, or a map that leads outside the target's vocabulary, repeats
            an id, is not ascending (``d2t``), or contradicts ``t2d``.
    """
    if "d2t" in tensors:
        name, ids = "d2t", torch.arange(size) + tensors["d2t"].to("cpu", torch.int64)
    elif "token_map" in tensors:
        name, ids = "token_map", tensors["token_map"].to("cpu", torch.int64)
    elif size == vocab_size:
        return None
    else:
        raise ModelLoadError(
            f"{directory}: its vocabulary has {size} tokens, the target's {vocab_size}, and there is no tensor 'd2t' "
            "that maps one to the other"
        )
    ordered = ids if name == "d2t" else ids.sort().values
    if int(ordered[0]) < 0 or int(ordered[-1]) >= vocab_size or bool((ordered.diff() <= 0).any()):
        form = "ascending offsets (target id = draft id + d2t)" if name == "d2t" else "different target ids"
        raise ModelLoadError(
            f"{directory}: {name!r} does not hold {form}: it leads from id {int(ids.min())} to {int(ids.max())}, "
            f"and the target's vocabulary has {vocab_size}"
        )
    mask = tensors.get("t2d")
    if mask is not None and not torch.equal(mask.nonzero().flatten().to("cpu"), ordered):
        raise ModelLoadError(f"{directory}: 't2d' marks other tokens than {name!r} leads to")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids
