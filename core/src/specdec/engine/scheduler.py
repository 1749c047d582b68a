"""Which requests run in a step, and how many tokens each.

There is no prefill phase and no decode phase: a request has ``num_tokens`` known tokens and possibly draft tokens, and
``num_computed_tokens`` of them are in the KV cache; the scheduler brings the second number towards the first within the
step's token budget. Running requests go first, in order of arrival (or priority), each with one token at
least; what is left goes to their draft tokens and prefill chunks, then to waiting requests.
When blocks run out, lookahead slots (room that a proposer drafts in) are not reserved, then drafts are shortened; then
the youngest running request is preempted: its blocks are released, and it computes its tokens again later.
"""

from __future__ import annotations

import time
from bisect import insort
from typing import TYPE_CHECKING

from specdec.engine.plan import Plan, ScheduledRequest
from specdec.engine.request import NO_DRAFT, Phase, Request

if TYPE_CHECKING:
    from specdec.engine.kv_cache import KVCacheManager


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    """Continuous batching over a fixed number of KV blocks."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_lookahead_slots: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        """Schedule over ``kv_cache``.

        Args:
            kv_cache: the blocks.
            max_num_seqs: most requests that run at a time.
            max_num_batched_tokens: most positions of a step.
            num_lookahead_slots: slots to reserve behind each share that samples.
            max_model_len: no slots are reserved past this length.
        """
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_lookahead_slots = num_lookahead_slots
        self._max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self.waiting, request, key=_order)

    def schedule(self) -> Plan:
        """Decide the next step. Requests may be preempted and admitted; nothing else changes until commit."""
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        num_preempted = 0
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            later = len(self.running) - i - 1
            share = self._share(request, max(1, budget - later))
            while not self._make_room(request, share):
                if share.draft is not NO_DRAFT:
                    share = self._shortened(share)
                    continue
                num_preempted += 1
                if self._preempt_youngest() is request:
                    break
            else:
                scheduled.append(share)
                budget -= share.num_tokens
                i += 1
        num_cached = 0
        if not num_preempted:
            num_cached = self._admit(scheduled, budget)
        return Plan(tuple(scheduled), num_preempted, num_cached)

    def finish(self, request: Request) -> None:
        """A request ended: give back what it holds. Finishing twice is harmless."""
        if request.phase is Phase.FINISHED:
            return
        (self.waiting if request.phase is Phase.WAITING else self.running).remove(request)
        self._release(request)
        request.phase = Phase.FINISHED

    def _share(self, request: Request, budget: int) -> ScheduledRequest:
        """The request's part of the step within ``budget`` positions; the draft is cut to what fits."""
        pending = request.num_tokens - request.num_computed_tokens
        if pending > budget:
            return ScheduledRequest(request, request.num_computed_tokens, budget, NO_DRAFT, samples=False)
        draft = request.draft
        if draft is not NO_DRAFT:
            draft = draft.truncated(budget - pending) if budget > pending else NO_DRAFT
        return ScheduledRequest(request, request.num_computed_tokens, pending + len(draft), draft, samples=True)

    def _shortened(self, share: ScheduledRequest) -> ScheduledRequest:
        """A share that does not fit, with as much of its draft as blocks are left for.

        Dropping the whole draft would keep short ones and drop long ones. Where drawn drafts end may depend on their
        tokens, and those of the drafts that are kept would no longer have the law that verifiers are told.
        """
        num_tokens = share.num_tokens - len(share.draft)
        room = self.kv_cache.most_positions(share.request) - share.num_computed_tokens - num_tokens
        draft = share.draft.truncated(room) if room > 0 else NO_DRAFT
        return ScheduledRequest(share.request, share.num_computed_tokens, num_tokens + len(draft), draft, share.samples)

    def _make_room(self, request: Request, share: ScheduledRequest) -> bool:
        """Allocate the share's slots, with lookahead slots behind them if there are enough blocks."""
        end = share.num_computed_tokens + share.num_tokens
        if self.num_lookahead_slots and share.samples and self.kv_cache.allocate(request, self._lookahead_end(end)):
            return True
        return self.kv_cache.allocate(request, end)

    def has_lookahead(self, request: Request) -> bool:
        """Whether a request's blocks reach over the lookahead slots behind its computed positions."""
        return self._lookahead_end(request.num_computed_tokens) <= len(request.block_ids) * self.kv_cache.block_size

    def _lookahead_end(self, end: int) -> int:
        """The end of the lookahead slots behind ``end`` positions; nothing is written past the longest text."""
        ahead = end + self.num_lookahead_slots
        return ahead if self._max_model_len is None else max(end, min(ahead, self._max_model_len))

    def _preempt_youngest(self) -> Request:
        """Send the running request that is last in order back to the queue; its computed state is dropped."""
        request = self.running.pop()
        self._release(request)
        request.phase = Phase.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        insort(self.waiting, request, key=_order)
        return request

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start waiting requests while budget, rows and blocks last; return how many tokens cached prefixes gave."""
        num_cached = 0
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting[0]
            cached = self.kv_cache.reuse_prefix(request)
            request.num_computed_tokens = cached
            share = self._share(request, budget)
            if not self._make_room(request, share):
                self.kv_cache.free(request)
                request.num_computed_tokens = 0
                break
            self.waiting.pop(0)
            request.phase = Phase.RUNNING
            request.batch_row = self._free_rows.pop()
            if request.timings.first_scheduled is None:
                request.timings.first_scheduled = time.monotonic()
            if request.num_preemptions == 0:
                request.num_cached_tokens = cached
                num_cached += cached
            insort(self.running, request, key=_order)
            scheduled.append(share)
            budget -= share.num_tokens
        return num_cached

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.draft = NO_DRAFT
        if request.batch_row >= 0:
            self._free_rows.append(request.batch_row)
            request.batch_row = -1
