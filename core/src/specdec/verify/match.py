"""The `match` verifier: sample the target at every row, keep the longest drafted path that equals the samples.

The sample of a row is the ordinary sampler's, with the row's own position-keyed noise, so the tokens are exactly
those that decoding without a draft gives: lossless at any temperature, and independent of the draft. For a draft that
was chosen without looking at the noise, a draft token is accepted with the target's probability of it, as in
rejection sampling of one-hot drafts (algorithm "sample and match"; for trees the collapsed form of recursive
rejection with deterministic children).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specdec.sampling.sampler import backend_of, sample
from specdec.types import PLACEHOLDER_TOKEN_ID, Verdict
from specdec.verify.base import Verifier
from specdec.verify.chains import Chains, longest_draft, owners, verdict_without_drafts

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows


class MatchVerifier(Verifier):
    """Accepts draft tokens that equal the target's own samples; for chains and trees, without host synchronisation.

    A row that gives no token (NaN, or everything masked) ends its run with a code of `specdec.sampling.outcome` in
    place of a token id, unless the row is not reached.
    """

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    accepts_trees: ClassVar[bool] = True
    needs_draft_probs: ClassVar[bool] = False

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step; see `specdec.verify.base.Verifier.verify`."""
        return verify_by_match(rows, draft, sampling)


def verify_by_match(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    """The rule of `match` for any step: what `match_drafts` makes of the samples of all rows."""
    if draft.token_ids.shape[0] == 0:
        return verdict_without_drafts(sample(rows.logits, rows, sampling), draft)
    verdict = backend_of(rows.logits.device.type).match(rows, draft, sampling)
    return match_drafts(rows, draft, sample(rows.logits, rows, sampling)) if verdict is None else verdict


def match_drafts(rows: Rows, draft: Draft, samples: Tensor) -> Verdict:
    """Keep the longest drafted path that equals ``samples``, int64 [R], for a step with at least one draft token."""
    return _match_chains(rows, draft, samples) if draft.parents is None else _match_trees(rows, draft, samples)


def _match_chains(rows: Rows, draft: Draft, samples: Tensor) -> Verdict:
    chains = Chains.of(rows, draft)
    chosen = samples[chains.rows]
    num_accepted = chains.accepted(chains.token_ids == chosen[:, :-1])
    return chains.verdict(num_accepted, chosen.gather(1, num_accepted[:, None])[:, 0])


def _match_trees(rows: Rows, draft: Draft, samples: Tensor) -> Verdict:
    """Walk every request's tree from its root, one depth at a time."""
    assert draft.parents is not None
    device = samples.device
    num_nodes = draft.token_ids.shape[0]
    parents = draft.parents.long()
    first_row = rows.row_start[:-1].long()
    request = torch.arange(rows.num_requests, device=device)
    owner = owners(draft)
    node_index = torch.arange(num_nodes, device=device) - (first_row - request)[owner]
    node = torch.full_like(request, -1)
    walking = torch.ones_like(request, dtype=torch.bool)
    tokens, nodes = [samples[first_row]], []
    for _ in range(longest_draft(rows, draft)):
        fits = walking[owner] & (parents == node[owner]) & (draft.token_ids == tokens[-1][owner])
        # The first of several equal children.
        child = torch.full_like(request, num_nodes).scatter_reduce(
            0, owner, node_index.where(fits, num_nodes), reduce="amin"
        )
        walking = child < num_nodes
        node = child.where(walking, node)
        nodes.append(child.where(walking, PLACEHOLDER_TOKEN_ID))
        tokens.append(samples[first_row + node + 1].where(walking, PLACEHOLDER_TOKEN_ID))
    accepted = torch.stack(nodes, dim=1)
    return Verdict(
        token_ids=torch.stack(tokens, dim=1),
        num_tokens=((accepted >= 0).sum(dim=1) + 1).int(),
        accepted_nodes=accepted.int(),
    )
