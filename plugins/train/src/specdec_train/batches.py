"""Training batches: sequences of similar length, padded at the end."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Batch:
    """B sequences of S rows; row i is position i of a sequence with the target's hidden states there."""

    token_ids: Tensor
    """int64 [B, S + 1]; row i is followed by token ``token_ids[:, i + 1]``. Padded with 0."""
    hidden: Tensor
    """[B, S, F, H]: tapped hidden states, then the final one."""
    lengths: Tensor
    """int64 [B]: rows that are not padding."""
    prompt_lengths: Tensor
    """int64 [B]."""

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(
            self.token_ids.to(device), self.hidden.to(device), self.lengths.to(device), self.prompt_lengths.to(device)
        )

    def tokens_ahead(self, distance: int) -> Tensor:
        """int64 [B, S]: the token ``distance`` positions after each row, 0 where the sequence has ended."""
        return shifted(self.hidden, self.token_ids, distance)

    def answers(self, distance: int) -> Tensor:
        """bool [B, S]: whether the token ``distance`` positions after the row belongs to the answer."""
        place = torch.arange(self.hidden.shape[1], device=self.hidden.device) + distance
        return (place >= self.prompt_lengths[:, None]) & (place <= self.lengths[:, None])


def shifted(like: Tensor, values: Tensor, distance: int) -> Tensor:
    """``values`` [B, N, ...] moved ``distance`` to the front along dimension 1, cut or zero-padded to the length of
    ``like``."""
    length = like.shape[1]
    moved = values[:, distance : distance + length]
    missing = length - moved.shape[1]
    if missing == 0:
        return moved
    return torch.cat([moved, moved.new_zeros(moved.shape[0], missing, *moved.shape[2:])], dim=1)
