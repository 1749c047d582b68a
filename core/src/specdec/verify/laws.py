"""The arithmetic of rejection sampling, as pure functions of probabilities.

Verifiers decide by these rules, and tests enumerate them: the law of what is emitted follows from them exactly.
``target`` and ``drafted`` are probabilities of the same tokens under the target's and the draft's law.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.sampling.backend import RowStatistics


def accepts(uniform: Tensor, target: Tensor, drafted: Tensor) -> Tensor:
    """Whether a draft token stays: with probability ``min(1, target / drafted)`` for a uniform strictly in (0, 1).

    A token that the draft's law cannot give is rejected, whatever the target thinks of it (Leviathan et al. 2023).
    """
    return (uniform * drafted <= target) & (drafted > 0)


def accept_probability(target: Tensor, drafted: Tensor) -> Tensor:
    """The probability with which `accepts` is true."""
    return torch.where(drafted > 0, (target / drafted).clamp(max=1.0), 0.0)


def residual(target: Tensor, drafted: Tensor) -> Tensor:
    """Weights, [..., V], not normalised, of the recovered token: ``max(target - drafted, 0)``.

    Where rounding leaves nothing of it, the target's own law: the two laws are then equal, and so is what they give.
    """
    weights = (target - drafted).clamp(min=0.0)
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, target)


def normalised(weights: Tensor) -> Tensor:
    """Weights [..., V] as probabilities."""
    return weights / weights.sum(dim=-1, keepdim=True)


def target_law(logits: Tensor, statistics: RowStatistics, temperature: Tensor) -> Tensor:
    """float64 [E, V]: the laws of rows of logits; one-hot at temperature 0, NaN for rows that give no token.

    Args:
        logits: [E, V].
        statistics: of the same rows.
        temperature: float32 [E].
    """
    greedy = temperature == 0
    scaled = logits.double() / temperature.double().masked_fill(greedy, 1.0)[:, None]
    law = (scaled - statistics.log_normalizers[:, None]).exp()
    one_hot = torch.zeros_like(law).scatter_(1, statistics.tokens.clamp(min=0)[:, None], 1.0)
    law = torch.where(greedy[:, None], one_hot, law)
    return law.masked_fill((statistics.tokens < 0)[:, None], torch.nan)
