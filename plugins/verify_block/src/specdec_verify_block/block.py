"""The `block` verifier: draft tokens with probabilities, verified jointly.

Of all rules that see only the two laws along the draft it keeps the most tokens on average (Sun et al. 2024), never
fewer than `rejection`, and what it emits has the target's law. `specdec_verify_block.rule` has the formulas.

Every draft position takes part in the decision, also those behind the kept ones. So neither their uniforms nor the
noise that drew them may return in the next step: both are keyed by the step, whose number is the position of the
request's first row, the first that the step decides on.

Requests without chance in their drafts (one-hot laws) or in their sampling (temperature 0) gain nothing from a joint
decision; theirs is token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specdec.cpu.library import Kernels
from specdec.sampling.noise import Purpose, uniforms
from specdec.sampling.sampler import backend_of
from specdec.verify import Verifier
from specdec.verify.chains import Chains
from specdec.verify.last_token import last_tokens
from specdec.verify.match import verify_by_match
from specdec.verify.rejection import verify_chains
from specdec_verify_block.rule import pass_probability, path_weights
from specdec_verify_block.surplus import surplus

if TYPE_CHECKING:
    from specdec.sampling.backend import RowStatistics
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows, Verdict

KERNELS = Kernels("specdec_verify_block.cpu")
"""The rule on CPUs."""


class BlockVerifier(Verifier):
    """Keeps the longest part of a chain that passes; for chains, with draft probabilities or without."""

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    accepts_trees: ClassVar[bool] = False
    needs_draft_probs: ClassVar[bool] = False
    uses_draft_probs: ClassVar[bool] = True

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step; see `specdec.verify.Verifier.verify`."""
        if draft.token_ids.shape[0] == 0 or sampling.all_greedy:
            return verify_by_match(rows, draft, sampling)
        if draft.draft_probs is None:
            return verify_chains(rows, draft, sampling)
        return _verify_blocks(rows, draft, sampling)


def _verify_blocks(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    if rows.logits.device.type == "cpu":
        from specdec.sampling.cpu.calls import StepCall

        return StepCall(rows, draft, sampling).run(KERNELS.address("block_region"))
    return verify_by_parts(rows, draft, sampling)


def verify_by_parts(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    """The rule in plain torch and the backend's operations, for chains with probabilities."""
    assert draft.draft_probs is not None
    chains = Chains.of(rows, draft)
    statistics = backend_of(rows.logits.device.type).statistics(
        rows.logits, sampling.temperature[chains.owner], rows=chains.node_rows
    )
    target, drafted = _probabilities(rows, draft, sampling, chains, statistics)
    weights = path_weights(torch.where(drafted > 0, target / drafted, 0.0))
    first = rows.positions[rows.row_start[:-1].long()]
    chance = uniforms(sampling.seeds, first, chains.nodes.shape[1], Purpose.ACCEPT)
    jointly = (sampling.temperature > 0) & ~((drafted >= 1) | ~chains.present).all(dim=1)
    passes = _passes(rows, draft, sampling, chains, statistics, weights, chance)
    place = torch.arange(1, passes.shape[1] + 1, device=passes.device)
    num_accepted = torch.where(
        jointly,
        (passes & chains.present).mul(place).amax(dim=1),
        chains.accepted((chance * drafted <= target) & (drafted > 0)),
    )
    node = chains.node_after(num_accepted)
    rejected = num_accepted < chains.counts
    before = torch.nn.functional.pad(weights, (1, 0), value=1.0).gather(1, num_accepted[:, None])
    scale = before.where(rejected[:, None] & jointly[:, None], 1.0)
    last = last_tokens(
        rows,
        sampling,
        chains.row_after(num_accepted),
        draft.token_ids[node].where(rejected, -1),
        statistics.at(node),
        # max(w P - Q, 0) and max(P - Q / w, 0) are the same weights.
        draft.draft_probs[node] / scale.float(),
        torch.arange(len(node), device=node.device),
    )
    return chains.verdict(num_accepted, last)


def _probabilities(
    rows: Rows, draft: Draft, sampling: SamplingBatch, chains: Chains, statistics: RowStatistics
) -> tuple[Tensor, Tensor]:
    """float64 [B, K]: the target's and the draft's probability of each draft token."""
    assert draft.draft_probs is not None
    temperature = sampling.temperature[chains.owner].double()
    greedy = temperature == 0
    logits = rows.logits[chains.node_rows, draft.token_ids].double()
    drawn = (logits / temperature.masked_fill(greedy, 1.0) - statistics.log_normalizers).exp()
    target = torch.where(greedy, (draft.token_ids == statistics.tokens).double(), drawn)
    index = torch.arange(len(draft.token_ids), device=target.device)
    drafted = draft.draft_probs[index, draft.token_ids].double()
    return target[chains.nodes], drafted[chains.nodes]


def _passes(
    rows: Rows,
    draft: Draft,
    sampling: SamplingBatch,
    chains: Chains,
    statistics: RowStatistics,
    weights: Tensor,
    chance: Tensor,
) -> Tensor:
    """bool [B, K]: which lengths 1 … K pass."""
    assert draft.draft_probs is not None
    place = torch.arange(1, weights.shape[1] + 1, device=weights.device)
    is_last = place == chains.counts[:, None]
    # Column i - 1 holds length i, which looks at the draft token behind it; nothing is over where w_i is 0.
    wanted = (place < chains.counts[:, None]) & (weights > 0) & (sampling.temperature[:, None] > 0)
    node = chains.nodes.roll(-1, dims=1).flatten()
    heat = sampling.temperature.repeat_interleave(weights.shape[1])
    over = surplus(
        rows.logits,
        chains.node_rows[node],
        heat.masked_fill(heat == 0, 1.0),
        statistics.at(node),
        weights.flatten(),
        draft.draft_probs,
        node,
    )
    over = over.view_as(weights).where(wanted, 0.0)
    chances = pass_probability(weights, over, is_last)
    # A row that gives no token is reached if everything before it passes, and ends the run with its code.
    return (chance <= chances) | (over.isnan() & (chance <= weights))
