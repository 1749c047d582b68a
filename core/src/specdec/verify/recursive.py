"""Recursive rejection: draft trees whose tokens were drawn from laws (multi-step speculative sampling).

At a node, with p the target's law there, its children are tried in order. Child j, drawn from q_j given the children
before it, is kept with probability ``min(1, p / q_j)``; otherwise p becomes ``max(p - q_j, 0)``, normalised, and the
next child is tried. When none is kept the token comes from the last p (SpecInfer, Miao et al. 2024). For children drawn
without replacement from one law, q_j is that law without the earlier children, normalised
(`specdec.drafting.sampling.DraftSampler.choose_children` reports it so); a one-hot q_j is a child chosen without
chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.noise import Purpose, race, uniform_at
from specdec.sampling.sampler import backend_of
from specdec.types import PLACEHOLDER_TOKEN_ID, Verdict
from specdec.verify.chains import longest_draft
from specdec.verify.laws import accepts, normalised, residual, target_law

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows


class _Walk:
    """The walk through every request's tree at once: one pass over node numbers, as parents come before children."""

    def __init__(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> None:
        assert draft.parents is not None
        self._rows = rows
        self._draft = draft
        self._parents = draft.parents
        self._sampling = sampling
        self._first_row = rows.row_start[:-1].long()
        request = torch.arange(rows.num_requests, device=self._first_row.device)
        self._first_node = self._first_row - request
        self.node = torch.full_like(request, -1)
        """The last accepted node of each request."""
        self.depth = torch.zeros_like(request)
        self.trial = torch.zeros_like(request)
        """How many children of it have been rejected."""
        self.law = self._target(request)
        """What the next token is drawn from: the target's law, less the rejected children's."""

    @property
    def row(self) -> Tensor:
        """int64 [B]: the row that decides."""
        return self._first_row + self.node + 1

    def try_node(self, number: int) -> Tensor:
        """Try node ``number`` of the requests that have reached its parent; int64 [B], its token or -1 if not kept."""
        index = (self._first_node + number).clamp(max=len(self._parents) - 1)
        here = (number < self._draft.num_draft_tokens) & (self._parents[index] == self.node)
        some = here.nonzero()[:, 0] if here.device.type == "cpu" else torch.arange(len(here), device=here.device)
        kept = torch.zeros_like(here)
        if len(some):
            kept[some] = self._try(some, index[some]) & here[some]
            rest = here[some] & ~kept[some]
            law = self.law[some]
            self.law[some] = torch.where(rest[:, None], normalised(residual(law, self._drafted(index[some]))), law)
            self._descend(number, kept, some)
            self.trial = torch.where(kept, 0, self.trial + (here & ~kept))
        return torch.where(kept, self._draft.token_ids[index], PLACEHOLDER_TOKEN_ID)

    def last_tokens(self) -> Tensor:
        """int64 [B]: the token after the accepted path, or a code of `specdec.sampling.outcome`."""
        temperature, positions = self._sampling.temperature, self._rows.positions[self.row]
        plain = backend_of(self.law.device.type).draw(
            self._rows.logits, temperature, self._sampling.seeds, positions, Purpose.SAMPLE, rows=self.row
        )
        ones = torch.ones_like(temperature)
        recovered, _ = race(self.law.log(), ones, self._sampling.seeds, positions, Purpose.RECOVER)
        return torch.where((self.trial > 0) & (plain >= 0), recovered, plain)

    def _target(self, some: Tensor) -> Tensor:
        rows, temperature = self.row[some], self._sampling.temperature[some]
        logits = self._rows.logits
        statistics = backend_of(logits.device.type).statistics(logits, temperature, rows=rows)
        return target_law(logits[rows], statistics, temperature)

    def _drafted(self, index: Tensor) -> Tensor:
        """float64 [n, V]: the laws that nodes were drawn from."""
        if self._draft.draft_probs is not None:
            return self._draft.draft_probs[index].double()
        law = self.law.new_zeros(len(index), self.law.shape[1])
        return law.scatter_(1, self._draft.token_ids[index, None], 1.0)

    def _try(self, some: Tensor, index: Tensor) -> Tensor:
        token = self._draft.token_ids[index]
        target = self.law[some, token]
        probs = self._draft.draft_probs
        drafted = torch.ones_like(target) if probs is None else probs[index, token].double()
        chance = uniform_at(
            self._sampling.seeds[some], self._rows.positions[self.row[some]], self.trial[some], Purpose.ACCEPT
        )
        return accepts(chance, target, drafted)

    def _descend(self, number: int, kept: Tensor, some: Tensor) -> None:
        self.node = torch.where(kept, number, self.node)
        self.depth = self.depth + kept
        moved = some[kept[some]] if kept.device.type == "cpu" else some
        if len(moved):
            self.law[moved] = torch.where(kept[moved, None], self._target(moved), self.law[moved])


def verify_trees(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    """Recursive rejection of a step with at least one tree node; chains among the trees are trees without siblings."""
    walk = _Walk(rows, draft, sampling)
    most = longest_draft(rows, draft)
    tokens = torch.full((rows.num_requests, most + 1), PLACEHOLDER_TOKEN_ID, device=rows.logits.device)
    path = torch.full((rows.num_requests, most), PLACEHOLDER_TOKEN_ID, device=rows.logits.device)
    # The one look at the device: trees have more nodes than the longest path.
    for number in range(int(draft.num_draft_tokens.max())):
        before = walk.depth
        token = walk.try_node(number)
        kept = (walk.depth > before)[:, None]
        place = before[:, None]
        tokens.scatter_(1, place, torch.where(kept, token[:, None], tokens.gather(1, place)))
        column = place.clamp(max=most - 1)
        path.scatter_(1, column, torch.where(kept, number, path.gather(1, column)))
    tokens.scatter_(1, walk.depth[:, None], walk.last_tokens()[:, None])
    return Verdict(token_ids=tokens, num_tokens=(walk.depth + 1).int(), accepted_nodes=path.int())
