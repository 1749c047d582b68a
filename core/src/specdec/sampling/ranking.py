"""The first tokens of each row by logit, the lower token id first among equals."""

from __future__ import annotations

import torch
from torch import Tensor

_HEAP_LIMIT = 1024
"""Above this many, sorting the row is faster than keeping a heap."""


def first_tokens(logits: Tensor, count: int) -> Tensor:
    """The first tokens of each row.

    Args:
        logits: [R, V], any float dtype.
        count: how many, at most V.

    Returns:
        int64 [R, count], the first one first. There is no host synchronisation.
    """
    if logits.device.type != "cpu" or count > _HEAP_LIMIT:
        return first_ranked(logits.float(), count)[1]
    from specdec.sampling.cpu import KERNELS

    tokens = torch.empty(logits.shape[0], count, dtype=torch.int64)
    if not tokens.numel():
        return tokens
    if logits.dtype == torch.bfloat16:
        bits = logits.contiguous().view(torch.uint16).numpy()
        KERNELS.function("first_tokens_of_bfloat16")(bits, tokens.numpy())
    else:
        KERNELS.function("first_tokens")(logits.float().contiguous().numpy(), tokens.numpy())
    return tokens


def first_ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rank each row.

    Args:
        logits: float32 [R, V].
        count: how many of the first tokens, at most V.

    Returns:
        Their logits, float32 [R, count], and token ids, int64 [R, count]. There is no host synchronisation.
    """
    if logits.device.type == "cpu" and count <= _HEAP_LIMIT:
        tokens = first_tokens(logits, count)
        return logits.gather(1, tokens), tokens
    if count < logits.shape[1]:
        return _first_by_topk(logits, count)
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    return values, tokens


def _first_by_topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    # Of several equal logits at the boundary ``torch.topk`` picks any, so those with the higher ids are masked first.
    last = logits.topk(count, dim=-1).values[:, -1:]
    tied = logits == last
    surplus = tied & (tied.cumsum(dim=-1) > count - (logits > last).sum(dim=-1, keepdim=True))
    tokens = logits.masked_fill(surplus, -torch.inf).topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)
