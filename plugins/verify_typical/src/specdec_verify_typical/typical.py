"""The `typical` verifier: keeps draft tokens that the target finds plausible. Lossy.

Typical acceptance (Cai et al. 2024, Medusa): a draft token x stays when the target's law P, at the request's
temperature, gives it more than ``min(epsilon, delta * exp(-H(P)))``, H being the entropy of P in nats. Of a tree's
paths whose nodes all stay the longest is kept, of equally long ones the most likely. The token after it is the
ordinary sample of its row, so every step gives at least one (Medusa takes the most likely there).

Requests at temperature 0 keep only what equals the target's choice, which is lossless for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specdec.sampling.sampler import sample
from specdec.types import PLACEHOLDER_TOKEN_ID, Verdict
from specdec.verify import Verifier
from specdec.verify.chains import longest_draft, owners, verdict_without_drafts
from specdec.verify.match import match_drafts

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows
    from specdec_verify_typical.config import TypicalConfig

_CHUNK_BYTES = 64 << 20


class TypicalVerifier(Verifier):
    """Keeps plausible draft tokens; for chains and trees."""

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    accepts_trees: ClassVar[bool] = True
    needs_draft_probs: ClassVar[bool] = False

    def __init__(self, config: TypicalConfig) -> None:
        self._config = config

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step; see `specdec.verify.Verifier.verify`."""
        samples = sample(rows.logits, rows, sampling)
        if draft.token_ids.shape[0] == 0:
            return verdict_without_drafts(samples, draft)
        if sampling.all_greedy:
            return match_drafts(rows, draft, samples)
        owner = owners(draft)
        index = torch.arange(len(owner), device=owner.device)
        first_node = (rows.row_start[:-1].long() - torch.arange(rows.num_requests, device=owner.device))[owner]
        parents = index - first_node - 1 if draft.parents is None else draft.parents.long()
        # The row that decides on a node is its parent's.
        deciding = rows.row_start[:-1].long()[owner] + parents + 1
        heat = sampling.temperature[owner]
        log_probs, entropy = _log_probs(rows.logits, deciding, heat.masked_fill(heat == 0, 1.0), draft.token_ids)
        stays = typical(log_probs, entropy, self._config.epsilon, self._config.delta)
        stays = torch.where(heat == 0, draft.token_ids == samples[deciding], stays)
        depth, score = _paths(stays, log_probs, first_node, parents, longest_draft(rows, draft))
        return _verdict(rows, draft, samples, owner, index - first_node, parents, depth, score)


def typical(log_probs: Tensor, entropy: Tensor, epsilon: float, delta: float) -> Tensor:
    """Whether tokens of these log-probabilities stay where the law has this entropy (nats)."""
    return log_probs.exp() > (delta * (-entropy).exp()).clamp(max=epsilon)


def _log_probs(logits: Tensor, rows: Tensor, temperature: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N] each: the target's log-probability of each token, and the entropy of its law, in nats."""
    found = torch.empty(len(rows), device=logits.device)
    entropy = torch.empty_like(found)
    step = max(1, _CHUNK_BYTES // (4 * max(logits.shape[1], 1)))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        law = (logits[rows[some]].float() / temperature[some, None]).log_softmax(dim=-1)
        found[some] = law.gather(1, token_ids[some, None])[:, 0]
        entropy[some] = -(law.exp() * law.clamp(min=-200.0)).sum(dim=-1)
    return found, entropy


def _paths(
    stays: Tensor, log_probs: Tensor, first_node: Tensor, parents: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Depth of each node whose whole path stays (0 for others), int64 [N], and the log-probability of its path."""
    parent = (first_node + parents).clamp(min=0)
    is_top = parents < 0
    depth = torch.zeros_like(parents)
    score = torch.zeros_like(log_probs)
    for _ in range(longest):
        above = depth[parent].where(~is_top, 0)
        reached = stays & (is_top | (above > 0))
        score = torch.where(reached, log_probs + score[parent].where(~is_top, 0.0), 0.0)
        depth = torch.where(reached, above + 1, 0)
    return depth, score


def _verdict(
    rows: Rows,
    draft: Draft,
    samples: Tensor,
    owner: Tensor,
    number: Tensor,
    parents: Tensor,
    depth: Tensor,
    score: Tensor,
) -> Verdict:
    """The deepest node of each request, of equally deep ones the most likely path's, and the sample behind it."""
    count, longest = rows.num_requests, longest_draft(rows, draft)
    request = torch.arange(count, device=owner.device)
    first_row = rows.row_start[:-1].long()
    best_depth = torch.zeros(count, dtype=torch.int64, device=owner.device).scatter_reduce(
        0, owner, depth, reduce="amax"
    )
    deepest = (depth > 0) & (depth == best_depth[owner])
    best_score = score.new_full((count,), -torch.inf).scatter_reduce(
        0, owner, score.where(deepest, -torch.inf), reduce="amax"
    )
    chosen = deepest & (score == best_score[owner])
    none = len(owner)
    node = torch.full_like(request, none).scatter_reduce(0, owner, number.where(chosen, none), reduce="amin")
    node = node.where(best_depth > 0, -1)
    tokens = torch.full((count, longest + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int64, device=owner.device)
    path = torch.full((count, longest), PLACEHOLDER_TOKEN_ID, dtype=torch.int64, device=owner.device)
    tokens.scatter_(1, best_depth[:, None], samples[first_row + node + 1][:, None])
    for step in range(longest):
        place = (best_depth - 1 - step)[:, None]
        here = place >= 0
        at = (first_row - request + node).clamp(min=0, max=none - 1)
        column = place.clamp(min=0)
        tokens.scatter_(1, column, torch.where(here, draft.token_ids[at][:, None], tokens.gather(1, column)))
        path.scatter_(1, column, torch.where(here, node[:, None], path.gather(1, column)))
        node = torch.where(here[:, 0], parents[at], node)
    return Verdict(
        token_ids=tokens,
        num_tokens=(best_depth + 1).int(),
        accepted_nodes=None if draft.parents is None else path.int(),
    )
