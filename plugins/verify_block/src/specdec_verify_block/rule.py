"""The rule of block verification, as pure functions (Sun et al. 2024, "Block verification accelerates speculative
decoding").

For a chain X_1 … X_k drawn from laws Q_i, with P_i the target's::

    w_0 = 1,   w_i = min(1, w_{i-1} P_i(X_i) / Q_i(X_i))
    S_i = sum over v of max(w_i P_{i+1}(v) - Q_{i+1}(v), 0)                i < k
    h_i = S_i / (S_i + 1 - w_i)  for i < k,   h_k = w_k

Each length i passes with probability h_i, independently; the longest that passes is kept (0 if none does). Then comes
one token, from P_{k+1} after a whole draft, otherwise with weights ``max(w_i P_{i+1} - Q_{i+1}, 0)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def path_weights(ratios: Tensor) -> Tensor:
    """float64 [B, K]: w_1 … w_K, from the ratios P_i(X_i) / Q_i(X_i), float64 [B, K]."""
    weights = []
    weight = torch.ones_like(ratios[:, 0])
    for place in range(ratios.shape[1]):
        weight = (weight * ratios[:, place]).clamp(max=1.0)
        weights.append(weight)
    return torch.stack(weights, dim=1)


def pass_probability(weights: Tensor, surplus: Tensor, is_last: Tensor) -> Tensor:
    """The probability h_i that a length passes.

    Args:
        weights: float64, w_i.
        surplus: float64, S_i; anything for the last.
        is_last: bool, whether i is the draft's whole length.

    Where w_i is 1 and nothing is left over the two laws of the next token are equal; the length may then pass, because
    the next one does with certainty. A weight that is not a number, because a row before gives no token, never passes.
    """
    missing = surplus + 1 - weights
    shares = torch.where(missing <= 0, 1.0, surplus / missing)
    return torch.where(is_last, weights, shares)
