"""The `rejection` verifier: rejection sampling of drafts against their own law.

A draft token X with probability q under the draft's law and p under the target's is kept with probability
``min(1, p / q)``. At the first rejection the token is recovered from ``max(p - q, 0)``, normalised; after a draft kept
whole comes a bonus token from the target (Leviathan, Kalman and Matias 2023; Chen et al. 2023). What is emitted has the
target's law if X was drawn from q. A draft without ``draft_probs`` counts as drawn from a law that gives nothing else;
that is exact for any way of choosing it.

Three streams of noise are involved, so that no draw can know another: the proposer's (`Purpose.DRAFT`), one uniform for
each draft position (`Purpose.ACCEPT`) and the race of the recovered token (`Purpose.RECOVER`). The bonus token, and
every token of a request without a draft, is the ordinary sample (`Purpose.SAMPLE`). All are keyed by position: what
lies behind a rejection was not looked at, so the next step may use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specdec.sampling.sampler import backend_of
from specdec.types import Verdict
from specdec.verify.base import Verifier
from specdec.verify.chains import Chains
from specdec.verify.config import RejectionConfig
from specdec.verify.last_token import last_tokens
from specdec.verify.match import verify_by_match
from specdec.verify.recursive import verify_trees

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows


class RejectionVerifier(Verifier):
    """Keeps draft tokens by their odds; for any mixture of requests: greedy or sampled, with probabilities or without.

    A row that gives no token (NaN, or everything masked) ends its run with a code of `specdec.sampling.outcome`.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    accepts_trees: ClassVar[bool] = True
    needs_draft_probs: ClassVar[bool] = False
    uses_draft_probs: ClassVar[bool] = True

    def __init__(self, config: RejectionConfig | None = None) -> None:
        self._config = config or RejectionConfig()

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step; see `specdec.verify.base.Verifier.verify`."""
        nothing = draft.token_ids.shape[0] == 0
        if nothing or sampling.all_greedy or (draft.parents is not None and self._config.tree_rule == "one_hot"):
            # Matching the target's own samples is the same rule at temperature 0, and for trees of one-hot laws.
            return verify_by_match(rows, draft, sampling)
        if draft.parents is not None:
            return verify_trees(rows, draft, sampling)
        return verify_chains(rows, draft, sampling)


def verify_chains(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    """Rejection sampling of chains, token by token, for a step with at least one draft token."""
    verdict = backend_of(rows.logits.device.type).reject(rows, draft, sampling)
    return _verify_by_parts(rows, draft, sampling) if verdict is None else verdict


def _verify_by_parts(rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
    chains = Chains.of(rows, draft)
    backend = backend_of(rows.logits.device.type)
    temperature = sampling.temperature[chains.owner]
    statistics = backend.statistics(rows.logits, temperature, rows=chains.node_rows)
    accepted = backend.accept(
        rows.logits,
        statistics,
        draft.token_ids,
        temperature,
        sampling.seeds[chains.owner],
        rows.positions[chains.node_rows],
        draft_probs=draft.draft_probs,
        rows=chains.node_rows,
    )
    num_accepted = chains.accepted(accepted[chains.nodes])
    node = chains.node_after(num_accepted)
    last = last_tokens(
        rows,
        sampling,
        chains.row_after(num_accepted),
        draft.token_ids[node].where(num_accepted < chains.counts, -1),
        statistics.at(node),
        draft.draft_probs,
        node,
    )
    return chains.verdict(num_accepted, last)
