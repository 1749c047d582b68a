"""The draft vocabulary: the tokens an answer is most likely made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def most_frequent(answers: Iterable[Tensor], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The ``size`` most frequent token ids of answers, ties and gaps filled with the lowest ids.

    Args:
        answers: int64 tensors of token ids.
        vocab_size: the target's.
        size: the draft vocabulary's.

    Returns:
        int64 [size], ascending, and the share of answer tokens that they cover.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids in answers:
        counts += torch.bincount(token_ids, minlength=vocab_size)
    chosen = torch.argsort(counts, descending=True, stable=True)[:size].sort().values
    total = int(counts.sum())
    return chosen, float(counts[chosen].sum() / total) if total else 0.0


def vocabulary_tensors(draft_token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` (target id minus draft id, int64) and ``t2d`` (bool), as EAGLE-3 checkpoints hold them."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_token_ids] = True
    return {"d2t": draft_token_ids - torch.arange(len(draft_token_ids)), "t2d": known}
