"""Plain dense attention in float32: the definition that backends must reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def visible(
    query_positions: Tensor, key_positions: Tensor, sliding_window: int | None = None, chunk_size: int | None = None
) -> Tensor:
    """Who sees whom by position: causal, within the window and within the chunk.

    Args:
        query_positions: int64 [..., Q].
        key_positions: int64 [..., K].
        sliding_window: a token sees itself and the ``sliding_window - 1`` positions before it.
        chunk_size: a token sees its own chunk of this many positions.

    Returns:
        bool [..., Q, K].
    """
    query, key = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    allowed = key <= query
    if sliding_window is not None:
        allowed &= query - key < sliding_window
    if chunk_size is not None:
        allowed &= query // chunk_size == key // chunk_size
    return allowed


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention with optional soft cap (Gemma 2) and attention sinks (gpt-oss), computed in float32.

    Args:
        query: [..., Q, num_heads, head_dim].
        key: [..., K, num_kv_heads, head_dim]; ``num_heads`` is a multiple of ``num_kv_heads``.
        value: [..., K, num_kv_heads, v_head_dim].
        allowed: bool [..., Q, K]; every query sees at least one key, unless there are sinks.
        scaling: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before masking.
        sinks: [num_heads]: one logit per head that joins the softmax denominator.

    Returns:
        [..., Q, num_heads, v_head_dim], contiguous, in the dtype of ``query``.
    """
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    grouped = query.float().reshape(*query.shape[:-2], num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
    scores = torch.einsum("...qhgd,...khd->...hgqk", grouped, key.float()) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[..., None, None, :, :], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-3]]
    out = torch.einsum("...hgqk,...khd->...qhgd", weights, value.float())
    return out.flatten(-3, -2).to(query.dtype).contiguous()
