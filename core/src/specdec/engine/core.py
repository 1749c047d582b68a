"""The engine: requests in, steps, finished requests out. One thread drives it.

One step, in one direction; only `Committer.commit` changes what a request consists of::

    plan = schedule()  ->  batch = build(plan)  ->  target = forward(batch)  ->  verdict = verify(target)
         ->  commit(plan, verdict)  ->  drafts for the next step = propose(...)  ->  statistics
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.errors import EngineDeadError, SpecdecError
from specdec.metrics.stats import EngineStats, RequestStats, StatsAccumulator, StepStats
from specdec.runner.shaping import DraftShaping
from specdec.wording import cause_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.engine.build import Parts
    from specdec.engine.plan import Plan
    from specdec.engine.request import Request
    from specdec.metrics.loggers import StatLogger
    from specdec.runner.batch import StepBatch
    from specdec.runner.commit import Committed
    from specdec.runner.drafting import Drafting
    from specdec.types import TargetOutput, Verdict

logger = logging.getLogger(__name__)


@frozen(eq=False)
class _Marks:
    """`time.perf_counter` at the borders of a step's stages."""

    begin: float
    forward: float
    verify: float
    commit: float
    propose: float
    end: float


class EngineCore:
    """Runs steps over the parts that `specdec.engine.build` put together."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._scheduler = parts.scheduler
        self._builder = parts.builder
        self._target = parts.target
        self._verification = parts.verification
        self._committer = parts.committer
        self._drafting = parts.drafting
        self._loggers: Sequence[StatLogger] = parts.stat_loggers
        self._stats = StatsAccumulator()
        self._shaping = DraftShaping(keeps_laws=parts.verification.verifier.uses_draft_probs)
        self._grammar_seconds = 0.0
        self._requests: dict[str, Request] = {}
        self._dead: Exception | None = None
        for stat_logger in self._loggers:
            stat_logger.start(self.stats)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Requests that have not been scheduled yet, or wait again after preemption."""
        return len(self._scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request; its id must be new."""
        self._check_alive()
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now and release what it holds; harmless when it has ended."""
        if request.request_id in self._requests:
            request.text += request.stop_checker.finish()
            request.finish_reason = "abort"
            self._end(request)
            if self._drafting is not None:
                self._drafting.finish(request.request_id)

    def step(self) -> list[Request]:
        """Run one step; return the requests that advanced or ended in it.

        Raises:
            EngineDeadError: a stage failed in a way that no request can survive; the cause is chained.
        """
        self._check_alive()
        begin = time.perf_counter()
        plan = self._scheduler.schedule()
        if not plan.scheduled:
            return []
        try:
            return self._run(plan, begin)
        except Exception as error:
            self._dead = error
            raise EngineDeadError(f"the engine stopped on an internal fault: {cause_of(error)}") from error

    def _run(self, plan: Plan, begin: float) -> list[Request]:
        step = self._builder.build(plan)
        forward = time.perf_counter()
        target = self._target.forward(step.packed)
        verify = time.perf_counter()
        processed, verdict = self._verification.run(step, target)
        commit = time.perf_counter()
        committed = self._committer.commit(step, target, processed, verdict)
        ended = self._release_finished(committed)
        propose = time.perf_counter()
        if self._drafting is not None:
            self._drafting.record(step, committed.outcomes, propose - begin)
            self._draft(self._drafting, step, target, verdict, ended)
        marks = _Marks(begin, forward, verify, commit, propose, time.perf_counter())
        self._record(plan, committed, marks)
        return committed.advanced

    def _draft(
        self, drafting: Drafting, step: StepBatch, target: TargetOutput, verdict: Verdict, ended: Sequence[Request]
    ) -> None:
        """Get drafts for the requests that run on and have room for them.

        The requests that ended have given back their blocks, but blocks are handed out only by the next `schedule`: a
        proposer with K/V of its own completes those that stay in the prefix cache.
        """
        running = [share.request for share in step.sampling if not share.request.is_finished]
        able = [request for request in running if self._scheduler.has_lookahead(request)]
        for request, draft in drafting.propose(able, step, target, verdict):
            request.draft = draft
        if drafting.is_on:
            for request in able:
                if request.grammar is not None:
                    request.draft = self._shaping.shape(request, request.draft, drafting.limit(request))
        for request in ended:
            if request.finish_reason in ("stop", "length"):
                drafting.complete(request)
            drafting.finish(request.request_id)

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        return self._stats.engine_stats(
            free_blocks=self._scheduler.kv_cache.num_free_blocks,
            total_blocks=self._scheduler.kv_cache.num_blocks,
            lossless=self._verification.verifier.lossless,
            num_proposer_faults=self._drafting.num_faults if self._drafting else 0,
            speculation_disabled=bool(self._drafting and not self._drafting.is_on),
            speculation_paused=bool(self._drafting and self._drafting.control.is_paused),
            current_draft_tokens=self._drafting.control.current if self._drafting else 0,
            proposer=self._drafting.report("stats") if self._drafting else {},
            proposer_memory=self._drafting.report("memory") if self._drafting else {},
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_grammar_cut_tokens=self._shaping.num_cut_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._scheduler.kv_cache.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and release everything; the engine cannot be used afterwards."""
        if isinstance(self._dead, _Closed):
            return
        for request in list(self._requests.values()):
            self.abort(request)
        if self._drafting is not None:
            self._drafting.close()
        self._dead = _Closed("the engine was closed")
        self._tell(lambda stat_logger: stat_logger.close())

    def _check_alive(self) -> None:
        if isinstance(self._dead, _Closed):
            raise EngineDeadError("the engine is closed")
        if self._dead is not None:
            raise EngineDeadError(f"the engine stopped earlier on: {self._dead}") from self._dead

    def _release_finished(self, committed: Committed) -> list[Request]:
        ended = [request for request in committed.advanced if request.finish_reason is not None]
        for request in ended:
            self._end(request)
        return ended

    def _end(self, request: Request) -> None:
        self._scheduler.finish(request)
        self._verification.forget(request.request_id)
        request.timings.finished = time.monotonic()
        if self._requests.pop(request.request_id, None) is not None:
            stats = _request_stats(request)
            self._tell(lambda stat_logger: stat_logger.record_request(stats))

    def _record(self, plan: Plan, committed: Committed, marks: _Marks) -> None:
        kv_cache = self._scheduler.kv_cache
        first_tokens, gaps = _latencies(committed.advanced)
        stats = StepStats(
            num_requests=len(plan.scheduled),
            num_tokens=plan.num_tokens,
            num_prompt_tokens=plan.num_prompt_tokens,
            num_cached_tokens=plan.num_cached_tokens,
            num_generated_tokens=committed.num_generated_tokens,
            num_drafts=committed.spec.num_drafts,
            num_draft_tokens_per_pos=tuple(committed.spec.drafted_per_pos),
            num_accepted_tokens_per_pos=tuple(committed.spec.accepted_per_pos),
            num_grammar_forced_tokens=committed.spec.num_forced,
            num_grammar_accepted_tokens=committed.spec.num_forced_accepted,
            target_seconds=marks.verify - marks.forward,
            verify_seconds=marks.commit - marks.verify,
            propose_seconds=marks.end - marks.propose,
            rest_seconds=(marks.forward - marks.begin) + (marks.propose - marks.commit),
            num_preemptions=plan.num_preempted,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_usage=1.0 - kv_cache.num_free_blocks / kv_cache.num_blocks,
            first_token_seconds=first_tokens,
            inter_token_seconds=gaps,
            grammar_seconds=self._new_grammar_seconds(),
            speculation_paused=bool(self._drafting and self._drafting.control.is_paused),
            current_draft_tokens=self._drafting.control.current if self._drafting else 0,
        )
        self._stats.add(stats)
        self._tell(lambda stat_logger: stat_logger.record(stats))

    def _new_grammar_seconds(self) -> float:
        """Time that grammars took since the last call."""
        before = self._grammar_seconds
        self._grammar_seconds = (
            self._verification.grammar_seconds + self._committer.grammar_seconds + self._shaping.seconds
        )
        return self._grammar_seconds - before

    def _tell(self, call: Callable[[StatLogger], None]) -> None:
        for stat_logger in self._loggers:
            try:
                call(stat_logger)
            except Exception:
                self._drop_logger(stat_logger)

    def _drop_logger(self, faulty: StatLogger) -> None:
        """Statistics are not worth an engine: go on without a logger that raises."""
        self._loggers = tuple(stat_logger for stat_logger in self._loggers if stat_logger is not faulty)
        logger.exception("the stat logger %s is switched off: it raised", type(faulty).__name__)


def _latencies(requests: Sequence[Request]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds until the first token, and since the last tokens, of the requests that emitted some just now."""
    first_tokens, gaps = [], []
    now = time.monotonic()
    for request in requests:
        timings = request.timings
        if timings.first_token is None:
            continue
        if timings.last_token is None:
            first_tokens.append(timings.first_token - timings.arrival)
        else:
            gaps.append(now - timings.last_token)
        timings.last_token = now
    return tuple(first_tokens), tuple(gaps)


def _request_stats(request: Request) -> RequestStats:
    timings = request.timings
    arrival = timings.arrival
    return RequestStats(
        finish_reason=request.finish_reason or "abort",
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queued_seconds=None if timings.first_scheduled is None else timings.first_scheduled - arrival,
        first_token_seconds=None if timings.first_token is None else timings.first_token - arrival,
        total_seconds=(timings.finished or arrival) - arrival,
        spec=request.spec.snapshot(),
    )


class _Closed(SpecdecError):
    """Marks an engine that was closed on purpose."""
