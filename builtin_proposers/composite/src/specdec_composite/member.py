"""One proposer among several: guarded, counted, and given only what concerns it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from specdec.draft_trees import node_depths
from specdec.metrics.stats import SpecCounter
from specdec.runner.draft_check import split_draft
from specdec.wording import cause_of
from specdec_composite.worth import Worth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.drafting import Proposer
    from specdec.engine.request import RequestDraft
    from specdec.types import ComputedStep, DraftOutcome, ProposalInput

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Member:
    """A proposer of a composite. What it raises counts against it alone."""

    def __init__(self, proposer: Proposer, *, name: str, label: str, max_draft_tokens: int, max_faults: int) -> None:
        self.proposer = proposer
        self.name = name
        self.label = label
        """The plugin with its distribution and version, for log lines."""
        self.max_draft_tokens = max_draft_tokens
        self.is_on = True
        self._max_faults = max_faults
        self._num_faults = self._faults_in_a_row = 0
        self._seconds = 0.0
        self._num_asked = 0
        self._counter = SpecCounter()
        self.worth = Worth(max_draft_tokens)
        """What its drafts promise and cost."""

    def guarded(self, call: Callable[[], T]) -> T | None:
        """Run a call into the proposer; a fault is counted and gives None."""
        if not self.is_on:
            return None
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._count_fault(error)
            return None

    def draft(
        self, batch: ProposalInput, chosen: Sequence[int], vocab_size: int, aux_layers: Sequence[int]
    ) -> list[RequestDraft] | None:
        """Checked drafts for the chosen requests of a batch; None when it is off or failed.

        Args:
            batch: what the engine gave.
            chosen: indices of the requests to draft for; may be empty for a member that follows every step.
            vocab_size: the target's.
            aux_layers: the tapped layers of the engine, in order.
        """
        own = self._own_input(batch, chosen, aux_layers)
        begin = time.perf_counter()
        drafts = self.guarded(
            lambda: split_draft(
                self.proposer.propose(own), own.max_draft_tokens, vocab_size, self.proposer.capabilities
            )
        )
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        self._num_asked += len(chosen)
        if drafts is None:
            return None
        self._faults_in_a_row = 0
        if chosen:
            limits = own.max_draft_tokens.tolist()
            lengths = [judged_length(draft, limit) for draft, limit in zip(drafts, limits, strict=True)]
            self.worth.record_drafts(np.array(lengths), seconds)
        return drafts

    def record(self, outcome: DraftOutcome, mine: np.ndarray) -> None:
        """Learn what became of this member's drafts: int [n], their indices in the outcome."""
        drafted, accepted = outcome.num_draft_tokens[mine], outcome.num_accepted_tokens[mine]
        parents = tuple([outcome.parents[i] for i in mine])
        for one in zip(drafted.tolist(), accepted.tolist(), parents, strict=True):
            self._counter.count(*one)
        self.worth.record_outcomes(drafted, accepted)
        own = attrs.evolve(
            outcome,
            request_ids=tuple([outcome.request_ids[i] for i in mine]),
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            parents=parents,
        )
        self.guarded(lambda: self.proposer.record(own))

    def stats(self) -> dict[str, Any]:
        """Counters, as plain values."""
        spec = self._counter.snapshot()
        return {
            "num_requests_asked": self._num_asked,
            "num_drafts": spec.num_drafts,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted_tokens": spec.num_accepted_tokens,
            "num_draft_tokens_per_pos": list(spec.num_draft_tokens_per_pos),
            "num_accepted_tokens_per_pos": list(spec.num_accepted_tokens_per_pos),
            "propose_seconds": self._seconds,
            "num_faults": self._num_faults,
            "is_on": self.is_on,
            "own": dict(self.guarded(self.proposer.stats) or {}),
        }

    def memory(self) -> Mapping[str, int]:
        """The proposer's memory."""
        return self.guarded(self.proposer.memory) or {}

    def _own_input(self, batch: ProposalInput, chosen: Sequence[int], aux_layers: Sequence[int]) -> ProposalInput:
        """The part of a batch that concerns the chosen requests, within this member's limit."""
        index = np.asarray(chosen, dtype=np.int64)
        return attrs.evolve(
            batch,
            request_ids=tuple([batch.request_ids[i] for i in chosen]),
            token_ids=tuple([batch.token_ids[i] for i in chosen]),
            max_draft_tokens=np.minimum(batch.max_draft_tokens[index], self.max_draft_tokens).astype(np.int32),
            sampling=tuple([batch.sampling[i] for i in chosen]) if batch.sampling else (),
            seeds=tuple([batch.seeds[i] for i in chosen]) if batch.seeds else (),
            computed=self._own_computed(batch.computed, aux_layers) if self.proposer.needs.follows_target else None,
            token_pointers=None if batch.token_pointers is None else batch.token_pointers[index],
            num_tokens=None if batch.num_tokens is None else batch.num_tokens[index],
        )

    def _own_computed(self, computed: ComputedStep | None, aux_layers: Sequence[int]) -> ComputedStep | None:
        """The target's step with the tapped layers that this member asked for, in its order."""
        wanted = self.proposer.needs.aux_layers
        if computed is None or computed.target.aux_hidden_states is None or tuple(wanted) == tuple(aux_layers):
            return computed
        states = computed.target.aux_hidden_states
        taps = tuple([states[list(aux_layers).index(layer)] for layer in wanted])
        return attrs.evolve(computed, target=attrs.evolve(computed.target, aux_hidden_states=taps or None))

    def _count_fault(self, error: BaseException) -> None:
        self._num_faults += 1
        self._faults_in_a_row += 1
        cause = cause_of(error)
        if self._num_faults == 1:
            logger.warning("%s failed; the other members go on: %s", self.label, cause)
        if self._faults_in_a_row >= self._max_faults:
            self.is_on = False
            logger.error(
                "%s is switched off after %d faults in a row; the other members go on. Cause: %s",
                self.label,
                self._faults_in_a_row,
                cause,
                exc_info=error,
            )


def judged_length(draft: RequestDraft, limit: int) -> int:
    """What a draft is preferred by: its depth, or ``limit`` where the tokens were drawn from the laws it comes with.

    Where drawn drafts end may depend on their tokens. Preferring the long ones would be preferring some tokens, and
    those that are left would no longer have the law that verifiers are told.
    """
    if not len(draft):
        return 0
    if draft.probs is not None:
        return limit
    return len(draft) if draft.parents is None else max(node_depths(draft.parents))
