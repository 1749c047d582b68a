"""Runs the proposer once per step and contains its faults.

A proposer that raises, breaks the contract or exceeds its time budget costs that step its speculation. After
``max_faults`` faults in a row it is switched off for this engine, and requests go on without speculation. Each kind of
fault is logged once with the plugin's distribution and version, and the place in its code.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from specdec.drafting.base import Proposer
from specdec.engine.request import Request, RequestDraft
from specdec.errors import ProposerError
from specdec.runner.computed import computed_step
from specdec.runner.draft_check import split_draft
from specdec.types import DraftOutcome, ProposalInput, RequestInfo
from specdec.wording import cause_of, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.control import Control
    from specdec.runner.batch import StepBatch
    from specdec.runner.commit import Outcome
    from specdec.types import TargetOutput, Verdict

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

DRAFTS_IN_VAIN = 50
"""After so many drafts of which no token was ever accepted something is likely to be wrong, and is worth a warning."""

KINDS_OF_FAULTS_LOGGED = 8
"""Each kind of fault is logged when it is first seen, up to so many kinds."""

_STEP_TIME_FADES = 0.9
"""How much of a slow step's time is still expected of the step after it."""


class Drafting:
    """The proposer of an engine, guarded."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        label: str,
        method: str,
        num_speculative_tokens: int,
        control: Control,
        max_model_len: int,
        vocab_size: int,
        max_faults: int,
        time_budget: float,
    ) -> None:
        self.proposer = proposer
        self.label = label
        """The proposer with its distribution and version, for log lines."""
        self.methods = tuple(dict.fromkeys((method, *proposer.methods)))
        """Names that a request may choose among."""
        self.num_faults = 0
        self.disabled_because: str | None = None
        self.control = control
        """Decides how much of what each request can use is asked for."""
        self._wants_outcomes = type(proposer).record is not Proposer.record
        self._k = num_speculative_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_faults = max_faults
        self._time_budget = time_budget
        self._faults_in_a_row = 0
        self._kinds_of_faults: set[tuple[str, type, str | None]] = set()
        """Those in the log already: method, exception and place."""
        self._step_seconds = 0.0
        """Of the slowest of the last steps."""
        self._decode_seconds: float | None = None
        """Of the last step, when it only decoded."""
        self._started: set[str] = set()
        self._drafts_in_vain: int | None = 0
        """Drafts verified while nothing was ever accepted; None once that is settled."""

    @property
    def is_on(self) -> bool:
        """Whether drafts are still asked for."""
        return self.disabled_because is None

    def propose(
        self, requests: Sequence[Request], step: StepBatch, target: TargetOutput, verdict: Verdict
    ) -> list[tuple[Request, RequestDraft]]:
        """Drafts for the next step; an empty list when there are none or on a fault.

        Args:
            requests: those that can take a draft.
            step: the batch that was run and committed.
            target: its output.
            verdict: the verifier's decision on it.
        """
        if not self.is_on:
            return []
        begin = time.perf_counter()
        caps = [max(self._most_nodes(request), 0) for request in requests]
        limits = self.control.limits([request.request_id for request in requests], caps)
        takers = [(request, limit) for request, limit in zip(requests, limits, strict=True) if limit > 0]
        if not takers and not self.proposer.needs.every_step:
            return []
        drafts = self._guarded("propose", lambda: self._ask(takers, step, target, verdict))
        if drafts is None:
            return []
        if self.proposer.capabilities.trees:
            drafts = [draft.no_deeper_than(self.limit(taker)) for (taker, _), draft in zip(takers, drafts, strict=True)]
        self.control.record_draft(
            [request.request_id for request, _ in takers],
            [limit for _, limit in takers],
            [len(draft) for draft in drafts],
            time.perf_counter() - begin,
        )
        return [(request, draft) for (request, _), draft in zip(takers, drafts, strict=True)]

    def record(self, step: StepBatch, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Learn how the last drafts did and what the step cost; called when a step is committed.

        Args:
            step: the batch that was run and committed.
            outcomes: of each draft in the step.
            seconds: from scheduling to commit.
        """
        self._step_seconds = max(seconds, _STEP_TIME_FADES * self._step_seconds)
        if not self.is_on:
            return
        if outcomes and self._drafts_in_vain is not None:
            self._watch_acceptance(
                self._drafts_in_vain + len(outcomes), any(outcome.accepted_nodes for outcome in outcomes)
            )
        num_tokens = len(step.packed.input_ids)
        only_decodes = num_tokens == len(step.layout.request_index)
        self._decode_seconds = seconds if only_decodes else None
        self.control.record_step(
            len(step.sampling),
            num_tokens if only_decodes else 0,
            seconds,
            [known for outcome in outcomes if (known := _known_outcome(outcome)) is not None],
        )
        if outcomes and self._wants_outcomes:
            requests, drafted, nodes, parents = zip(*outcomes, strict=True)
            outcome = DraftOutcome(
                request_ids=tuple([request.request_id for request in requests]),
                num_draft_tokens=np.array(drafted, dtype=np.int32),
                num_accepted_tokens=np.array([len(path) for path in nodes], dtype=np.int32),
                parents=parents,
            )
            self._guarded("record", lambda: self.proposer.record(outcome))

    def complete(self, request: Request) -> None:
        """A request ended by itself; `finish` comes next.

        A proposer that keeps completed requests learns those for which no draft was asked too.
        """
        if not self.is_on:
            return
        if self.proposer.capabilities.keeps_finished_requests:
            self._guarded("start", lambda: self._start([request]))
        if request.request_id in self._started:
            self._guarded("complete", lambda: self.proposer.complete(request.request_id, request.token_ids))

    def finish(self, request_id: str) -> None:
        """A request ended; called after `propose` of the step in which it did."""
        self.control.finish(request_id)
        if request_id in self._started:
            self._started.discard(request_id)
            self._guarded("finish", lambda: self.proposer.finish(request_id))

    def report(self, what: Literal["stats", "memory"]) -> Mapping[str, Any]:
        """What the proposer says about itself; nothing when that fails."""
        return self._guarded(what, self.proposer.stats if what == "stats" else self.proposer.memory) or {}

    def close(self) -> None:
        """The engine stops."""
        self._guarded("close", self.proposer.close)

    def limit(self, request: Request) -> int:
        """Draft tokens the request can accept: one more token is emitted, within both length limits."""
        return min(self._most_nodes(request), request.max_tokens - request.num_output_tokens - 1)

    def _most_nodes(self, request: Request) -> int:
        """Draft tokens to ask for. A tree may have more than can be accepted, where there are positions for them."""
        left = request.max_tokens - request.num_output_tokens - 1
        room = self._max_model_len - request.num_tokens - 1
        k = self._k if request.speculation is None else request.speculation.limit(self._k)
        return min(k, room) if self.proposer.capabilities.trees and left > 0 else min(k, room, left)

    def _ask(
        self, takers: Sequence[tuple[Request, int]], step: StepBatch, target: TargetOutput, verdict: Verdict
    ) -> list[RequestDraft]:
        requests = [request for request, _ in takers]
        if self.proposer.needs.every_step:
            self._start([share.request for share in step.scheduled])
        else:
            self._start(requests)
        limits = np.array([limit for _, limit in takers], dtype=np.int32)
        batch = self._input(requests, limits, step, target, verdict)
        begin = time.perf_counter()
        draft = self.proposer.propose(batch)
        seconds = time.perf_counter() - begin
        self._check_time(seconds, int(limits.max(initial=0)))
        drafts = split_draft(draft, limits, self._vocab_size, self.proposer.capabilities)
        self._faults_in_a_row = 0
        return drafts

    def _check_time(self, seconds: float, longest: int) -> None:
        """Refuse a draft that took too long.

        A proposer that follows every step or reads the target's states runs a model of its own. It is not too slow
        while it takes no longer than the target would: a step for each draft token and one for the text it has to run
        over first. What is measured against the budget is the time beyond that, so that a slow or busy machine is no
        fault of the proposer's.
        """
        needs = self.proposer.needs
        own = (1 + longest) * self._step_seconds if needs.follows_target else 0.0
        if self._time_budget and seconds > self._time_budget + own:
            raise ProposerError(
                f"propose() took {seconds:.3f} s; proposer_time_budget is {self._time_budget:g} s"
                + (f", and the target's own time for {1 + longest} steps {own:.3f} s" if own else "")
            )

    def _start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id not in self._started:
                self._started.add(request.request_id)
                self.proposer.start(
                    RequestInfo(
                        request_id=request.request_id,
                        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
                        sampling=request.params,
                        seed=request.seed,
                        speculation=request.speculation,
                    )
                )

    def _input(
        self,
        requests: Sequence[Request],
        limits: np.ndarray,
        step: StepBatch,
        target: TargetOutput,
        verdict: Verdict,
    ) -> ProposalInput:
        common: dict[str, Any] = {
            "request_ids": tuple([request.request_id for request in requests]),
            "token_ids": tuple([request.token_ids for request in requests]),
            "max_draft_tokens": limits,
            "sampling": tuple([request.params for request in requests]),
            "seeds": tuple([request.seed for request in requests]),
            "token_pointers": np.array([request.token_pointer for request in requests], dtype=np.int64),
            "num_tokens": np.array([request.num_tokens for request in requests], dtype=np.int64),
            "step_seconds": self._decode_seconds,
        }
        needs = self.proposer.needs
        if not needs.follows_target:
            return ProposalInput(**common)
        return ProposalInput(**common, computed=computed_step(step, target, verdict))

    def _guarded(self, method: str, call: Callable[[], _T]) -> _T | None:
        """Run a call into the plugin; a fault is counted and gives None. A plugin cannot end the program either.

        Args:
            method: of the proposer, for the log.
            call: what calls it.
        """
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._count_fault(method, error)
            return None

    def _watch_acceptance(self, num_drafts: int, accepted: bool) -> None:
        """Say so once when nothing of the first drafts was accepted; a head of another target looks like that."""
        self._drafts_in_vain = None if accepted or num_drafts >= DRAFTS_IN_VAIN else num_drafts
        if not accepted and num_drafts >= DRAFTS_IN_VAIN:
            logger.warning(
                "%s: no token of the first %d drafts was accepted. The output is right, but speculation gains nothing; "
                "if a draft model or head drafts, check that it was made for this target",
                self.label,
                num_drafts,
            )

    def _count_fault(self, method: str, error: BaseException) -> None:
        self.num_faults += 1
        self._faults_in_a_row += 1
        cause = cause_of(error)
        kind = (method, type(error), place_of(error))
        if kind not in self._kinds_of_faults and len(self._kinds_of_faults) < KINDS_OF_FAULTS_LOGGED:
            self._kinds_of_faults.add(kind)
            effect = "this step runs without speculation" if method == "propose" else "requests go on"
            logger.warning("%s failed in %s(), %s: %s", self.label, method, effect, cause)
        if self.is_on and self._faults_in_a_row >= self._max_faults:
            self.disabled_because = cause
            logger.error(
                "%s is switched off after %d faults in a row; requests go on without speculation. Cause: %s",
                self.label,
                self._faults_in_a_row,
                cause,
                exc_info=error,
            )


def _known_outcome(outcome: Outcome) -> tuple[str, int, Sequence[int]] | None:
    """What an outcome says about acceptance: nothing about the tokens that a stop cut off."""
    drafted = outcome.drafted
    if outcome.request.is_finished:
        drafted = (
            len(outcome.accepted_nodes) if outcome.parents is None else 0
        )  # of a tree the nodes cut off may be any
    return (outcome.request.request_id, drafted, outcome.accepted_nodes) if drafted else None
