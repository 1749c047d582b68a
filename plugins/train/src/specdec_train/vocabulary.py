"""The draft vocabulary: the tokens an answer is most likely made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def most_frequent(answers: Iterable[Tensor], vocab_size: int, size: int) -> Tensor:
    """The ``size`` most frequent token ids of answers, ties and gaps filled with the lowest ids.

    Args:
        answers: int64 tensors of token ids.
        vocab_size: the target's.
        size: the draft vocabulary's.

    Returns:
        int64 [size], ascending.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids in answers:
        counts += torch.bincount(token_ids, minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def coverage(draft_token_ids: Tensor, answers: Iterable[Tensor]) -> float:
    """The share of answers' tokens that can be drafted; honest for answers that the choice was not made by."""
    known, total = 0, 0
    for token_ids in answers:
        known, total = known + int(torch.isin(token_ids, draft_token_ids).sum()), total + len(token_ids)
    return known / max(1, total)


def vocabulary_tensors(draft_token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` (target id minus draft id, int64) and ``t2d`` (bool), as EAGLE-3 checkpoints hold them."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_token_ids] = True
    return {"d2t": draft_token_ids - torch.arange(len(draft_token_ids)), "t2d": known}
