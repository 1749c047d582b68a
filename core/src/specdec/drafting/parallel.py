"""Chains whose tokens come from one pass: mask tokens stand for those that are not known yet (PARD, P-EAGLE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.drafting.chain import NextLogits

MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")
"""Keys of ``config.json`` that hold the mask id of a model trained for parallel drafting."""


def logits_in_parallel(logits: Tensor, limits: np.ndarray) -> tuple[Tensor, NextLogits]:
    """Take the logits of one pass apart, for `ChainDrafter.run`.

    Args:
        logits: [sum of limits, draft vocabulary]: of each request in order, one row for each of its draft tokens.
        limits: int64 [B]: the requests' numbers of draft tokens, 0 for none.

    Returns:
        The logits of the first draft tokens, and a look-up of the others.
    """
    starts = np.cumsum(limits) - limits

    def next_logits(token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
        return logits[torch.from_numpy(starts[chosen] + depth + 1).to(logits.device)]

    first = torch.from_numpy(starts[limits > 0]).to(logits.device)
    return logits[first], next_logits
