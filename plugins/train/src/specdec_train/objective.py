"""The loss of a batch and how well its drafts would do.

At draft step j, row i of a sequence predicts token ``i + 2 + j``. The label is the target's law there, which is the
softmax of its logits at row ``i + 1 + j``, over the draft vocabulary (EAGLE-3's loss; soft labels as in distillation).
A head that predicts the target's final hidden states is also drawn to those of row ``i + 1 + j`` (EAGLE's loss).
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from specdec_train.batches import Batch, shifted
from specdec_train.heads.base import TrainableHead
from specdec_train.loss import projected_cross_entropy
from specdec_train.targets import FrozenTarget, soft_targets

STEP_DECAY = 0.8
"""Weight of a draft step relative to the one before it."""


@frozen(eq=False)
class Measured:
    """One batch under a head."""

    loss: Tensor
    """Scalar, with gradients."""
    accuracy: list[float]
    """Per draft step: share of answer tokens drafted right, given the true tokens before them."""
    num_drafts: int
    """Verify steps that decoding the answers at temperature 0 with chains would take."""
    num_accepted_tokens: int
    """Draft tokens that they would keep."""

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step at temperature 0, with the one that comes free."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_drafts)


class Objective(nn.Module):
    """A head with its loss, as the module that is trained."""

    def __init__(self, head: TrainableHead, target: FrozenTarget, num_steps: int) -> None:
        """Hold a head.

        Args:
            head: the head in training.
            target: the frozen weights.
            num_steps: draft steps.
        """
        super().__init__()
        self.head = head
        self.target = target
        self.num_steps = num_steps

    def forward(self, batch: Batch) -> Measured:
        """Run all draft steps over sequences with the target's hidden states, whose tokens the target said."""
        head, target = self.head, self.target
        rows = head.rows(target)
        law, place = self._law(batch)
        loss = batch.hidden.new_zeros(())
        alive = torch.ones_like(place, dtype=torch.bool)
        accuracy, kept = [], torch.zeros_like(place)
        for step, output in enumerate(head.steps(batch, target, self.num_steps)):
            chosen = batch.answers(2 + step)
            wanted = batch.tokens_ahead(2 + step)[chosen]
            known = target.in_draft_vocabulary(wanted)
            weight = STEP_DECAY**step / chosen.sum().clamp(min=1) * known
            added, best = projected_cross_entropy(
                output[chosen], rows, law, shifted(chosen, place, 1 + step)[chosen], weight
            )
            loss = loss + head.cross_entropy_weight * added
            if head.regression_weight:
                states = shifted(batch.hidden, batch.hidden[..., -1, :], 1 + step)[chosen]
                distance = functional.smooth_l1_loss(output[chosen], states, reduction="sum")
                loss = loss + head.regression_weight * STEP_DECAY**step * distance / max(states.numel(), 1)
            hit = target.draft_token_ids[best] == wanted
            right = torch.zeros_like(chosen)
            right[chosen] = hit
            alive = alive & right
            kept += alive
            accuracy.append(float(hit.float().mean()) if hit.numel() else 0.0)
        return Measured(loss, accuracy, *decoded(batch, kept))

    @torch.no_grad()
    def _law(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's laws [M, draft vocabulary] where it said a token, and int64 [B, S]: the law of each row."""
        said = batch.answers(1)
        place = torch.zeros(said.shape, dtype=torch.int64, device=said.device)
        place[said] = torch.arange(int(said.sum()), device=said.device)
        return soft_targets(self.target.logits(batch.hidden[..., -1, :][said])), place


def decoded(batch: Batch, kept: Tensor) -> tuple[int, int]:
    """Decode the answers with the drafts: a step begins where the one before it ended.

    Steps begin more often where drafts fail, so that fewer tokens are kept than the mean over all rows.

    Args:
        batch: the answers.
        kept: int64 [B, S]: draft tokens that are right, one after another, of a draft made at each row.

    Returns:
        Drafts made, and draft tokens kept.
    """
    num_drafts = num_accepted = 0
    starts, ends = batch.prompt_lengths.tolist(), batch.lengths.tolist()
    for place, end, lengths in zip(starts, ends, kept.tolist(), strict=True):
        while place < end:
            num_drafts += 1
            num_accepted += lengths[place - 1]
            place += lengths[place - 1] + 1
    return num_drafts, num_accepted
