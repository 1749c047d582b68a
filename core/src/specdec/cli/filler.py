"""A proposer that only fills rows, to measure what verifying costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.drafting.base import Proposer
from specdec.types import Draft

if TYPE_CHECKING:
    from specdec.types import ProposalInput


class RepeatProposer(Proposer):
    """Drafts the last token again, ``length`` times if it may."""

    length = 0
    """Draft tokens per request; set it before a step for the drafts made at its end."""

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        import torch

        counts = np.minimum(batch.max_draft_tokens, self.length).astype(np.int32)
        last = np.array([tokens[-1] for tokens in batch.token_ids], dtype=np.int64)
        return Draft(
            token_ids=torch.from_numpy(np.repeat(last, counts)), num_draft_tokens=torch.from_numpy(counts.copy())
        )
