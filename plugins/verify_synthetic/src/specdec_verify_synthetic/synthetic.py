"""The `synthetic` verifier: keeps draft tokens by chance alone, at chosen rates. Its text is nonsense.

It separates what a step costs from what a proposer is worth: with the acceptance fixed, scheduler, kernels and draft
lengths can be measured and compared. Position i of a draft is kept when all before it are and a uniform of its own is
below the ratio of its rate to the rate before. In a tree the first child of each kept node is tried. The token after
the kept ones is the ordinary sample of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch
from torch import Tensor

from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.sampler import sample
from specdec.verify import Verifier
from specdec.verify.chains import owners, verdict_without_drafts
from specdec.verify.match import match_drafts
from specdec_verify_synthetic.config import conditional

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows, Verdict

_NOTHING = -9
"""No token equals it."""


class SyntheticVerifier(Verifier):
    """Keeps draft tokens at given rates, greedy and sampled requests alike; for benchmarks."""

    name: ClassVar[str] = "synthetic"
    lossless: ClassVar[bool] = False
    benchmark_only: ClassVar[bool] = True
    accepts_trees: ClassVar[bool] = True
    needs_draft_probs: ClassVar[bool] = False

    def __init__(self, rates: Sequence[float]) -> None:
        """Take the unconditional rates of positions 1, 2, …; they must not rise."""
        self._chances = torch.tensor([*conditional(rates), 0.0], dtype=torch.float64)

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step; see `specdec.verify.Verifier.verify`."""
        samples = sample(rows.logits, rows, sampling)
        if draft.token_ids.shape[0] == 0:
            return verdict_without_drafts(samples, draft)
        wanted = self._wanted(rows, draft, sampling)
        verdict = match_drafts(rows, draft, wanted)
        last = verdict.num_tokens.long() - 1
        if verdict.accepted_nodes is None:
            node = last - 1
        else:
            path = torch.nn.functional.pad(verdict.accepted_nodes.long(), (1, 0), value=-1)
            node = path.gather(1, last[:, None])[:, 0]
        row = rows.row_start[:-1].long() + node + 1
        return attrs.evolve(verdict, token_ids=verdict.token_ids.scatter(1, last[:, None], samples[row][:, None]))

    def _wanted(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Tensor:
        """int64 [R]: the draft token that shall follow each row, its first child, or `_NOTHING`."""
        first_row = rows.row_start[:-1].long()
        depth = rows.positions - rows.positions[first_row][rows.request_index]
        chances = self._chances.to(depth.device)
        chance = chances[depth.clamp(max=len(chances) - 1)]
        seeds = sampling.seeds[rows.request_index]
        kept = uniforms(seeds, rows.positions, 1, Purpose.ACCEPT)[:, 0] < chance
        child = _first_children(rows, draft)
        tokens = torch.nn.functional.pad(draft.token_ids, (0, 1), value=_NOTHING)
        return torch.where(kept, tokens[child], _NOTHING)


def _first_children(rows: Rows, draft: Draft) -> Tensor:
    """int64 [R]: the index among the N draft tokens of each row's first child; N where it has none."""
    owner = owners(draft)
    index = torch.arange(len(owner), device=owner.device)
    parent_row = index + owner
    if draft.parents is not None:
        parent_row = rows.row_start[:-1].long()[owner] + draft.parents.long() + 1
    none = torch.full((rows.request_index.shape[0],), len(owner), dtype=torch.int64, device=owner.device)
    return none.scatter_reduce(0, parent_row, index, reduce="amin")
