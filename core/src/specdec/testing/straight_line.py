"""Decoder layers as plain programs over whole texts, to compare heads with; no code is shared with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from specdec.drafting.base import DraftHead


def norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    """RMS norm over the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, theta: float, *, interleaved: bool = False) -> Tensor:
    """Turn pairs of [T, n, d] by position / theta^(2 i / d): halves (i, i + d / 2), or neighbours (2 i, 2 i + 1)."""
    half = x.shape[-1] // 2
    angle = (positions.float()[:, None] * theta ** (-torch.arange(half).float() / half))[:, None]
    if not interleaved:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    return torch.stack(turned, -1).flatten(-2)


def attended(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float | None = None) -> Tensor:
    """Causal attention [T, heads, d] over [T, kv heads, d] -> [T, heads * d_v]."""
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = []
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, shared].T * scaling
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -math.inf)
        out.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(out, -1)


def gated(w: Mapping[str, Tensor], gate: str, up: str, down: str, x: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)`` by the weights' names."""
    g = F.linear(x, w[gate])
    return F.linear(g * torch.sigmoid(g) * F.linear(x, w[up]), w[down])


def latent_attention(
    w: Mapping[str, Tensor],
    names: Callable[[str], str],
    x: Tensor,
    positions: Tensor,
    *,
    heads: int,
    nope: int,
    rope: int,
    theta: float,
    scaling: float | None = None,
    query_factor: Tensor | float = 1.0,
) -> Tensor:
    """Multi-head latent attention with interleaved rotation.

    Args:
        w: weights.
        names: from DeepSeek's short name of a part (``q_a_proj``, …) to the name of its weight.
        x: [T, width].
        positions: int64 [T].
        heads: number of heads.
        nope: width of the part of a head that is not rotated.
        rope: width of the part that is.
        theta: base of the angles.
        scaling: on the scores; None: from the width of a head.
        query_factor: [T, 1, 1] on the queries.
    """
    low = norm(F.linear(x, w[names("q_a_proj")]), w[names("q_a_layernorm")])
    q = F.linear(low, w[names("q_b_proj")]).view(len(x), heads, nope + rope)
    both = F.linear(x, w[names("kv_a_proj_with_mqa")])
    latent, k_rope = both[:, :-rope], both[:, -rope:]
    expanded = F.linear(norm(latent, w[names("kv_a_layernorm")]), w[names("kv_b_proj")]).view(len(x), heads, -1)
    k_nope, v = expanded[..., :nope], expanded[..., nope:]
    q = torch.cat([q[..., :nope], rotated(q[..., nope:], positions, theta, interleaved=True)], -1)
    k_rope = rotated(k_rope[:, None], positions, theta, interleaved=True).expand(-1, heads, -1)
    out = attended(q * query_factor, torch.cat([k_nope, k_rope], -1), v, positions, scaling)
    return F.linear(out, w[names("o_proj")])


def run_head(head: DraftHead, states: tuple[Tensor, ...], token_ids: Tensor, positions: Tensor) -> Tensor:
    """A pass of a head over one text without a cache, all rows with the target's hidden states."""
    from specdec.target import bridge

    context = bridge.ReferenceContext(head.attention_layers, {}, head.query_scales, positions)
    with bridge.using(context), torch.inference_mode():
        return head.forward(token_ids, head.fuse(states), positions, 0)
