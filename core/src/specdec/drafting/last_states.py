"""For methods that draft from the target's last hidden state alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.types import ProposalInput


def last_states(batch: ProposalInput, wanted: np.ndarray) -> Tensor:
    """The final hidden state that gave each request's newest token.

    Args:
        batch: with ``computed``, of a proposer that needs hidden states.
        wanted: int64 [A]: which requests of the proposal.

    Returns:
        [A, H].
    """
    computed = batch.computed
    assert computed is not None
    row_of = {name: row for row, name in enumerate(computed.request_ids)}
    rows = [row_of[batch.request_ids[i]] for i in wanted.tolist()]
    # The newest token was sampled behind the last kept one.
    last = computed.kept[computed.kept_start[1:][rows] - 1]
    hidden = computed.target.hidden_states
    assert hidden is not None
    return hidden.index_select(0, torch.from_numpy(last).to(hidden.device))
