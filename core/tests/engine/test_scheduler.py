"""Budgets, order, drafts under pressure, preemption."""

from __future__ import annotations

import pytest

from specdec.engine.kv_cache import KVCacheManager
from specdec.engine.plan import Plan
from specdec.engine.request import Phase, Request, RequestDraft
from specdec.engine.scheduler import Scheduler
from specdec.sampling.params import SamplingParams


def make_scheduler(num_blocks: int = 64, block_size: int = 4, budget: int = 16, seqs: int = 8) -> Scheduler:
    kv_cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching=False)
    return Scheduler(kv_cache, max_num_seqs=seqs, max_num_batched_tokens=budget)


def make_request(name: str, length: int, order: int = 0, priority: int = 0) -> Request:
    return Request(
        name,
        list(range(length)),
        SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        stop_checker=None,  # type: ignore[arg-type]
        max_tokens=64,
        priority=priority,
        arrival_index=order,
    )


def commit(plan: Plan, accepted: int = 0) -> None:
    """Stand in for the rest of the step: every sampling request emits ``accepted`` drafts and one token."""
    for share in plan.scheduled:
        request = share.request
        request.num_computed_tokens = share.num_computed_tokens + share.num_tokens - len(share.draft)
        if share.samples:
            kept = min(accepted, len(share.draft))
            request.num_computed_tokens += kept
            request.append([1] * (kept + 1))
            request.draft = RequestDraft([])


def summary(plan: Plan) -> list[tuple[str, int, int]]:
    return [(s.request.request_id, s.num_tokens, len(s.draft)) for s in plan.scheduled]


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_once_at_the_end() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request("a", 40))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append((plan.scheduled[0].num_tokens, plan.scheduled[0].samples))
        commit(plan)
    assert seen == [(16, False), (16, False), (8, True)]


def test_decoding_requests_go_before_prefill_chunks() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request("a", 4, 1))
    commit(scheduler.schedule())
    scheduler.add(make_request("b", 100, 2))
    assert summary(scheduler.schedule()) == [("a", 1, 0), ("b", 15, 0)]


def test_draft_tokens_count_against_the_budget_and_every_request_gets_a_token() -> None:
    scheduler = make_scheduler(budget=6)
    requests = [make_request(name, 2, i) for i, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    commit(scheduler.schedule())
    for request in requests:
        request.draft = RequestDraft([7, 8, 9])
    assert summary(scheduler.schedule()) == [("a", 4, 3), ("b", 1, 0), ("c", 1, 0)]


def test_a_shortened_draft_keeps_its_first_tokens() -> None:
    scheduler = make_scheduler(budget=3)
    request = make_request("a", 2)
    scheduler.add(request)
    commit(scheduler.schedule())
    request.draft = RequestDraft([7, 8, 9, 10])
    assert scheduler.schedule().scheduled[0].draft.token_ids == [7, 8]


def test_drafts_are_dropped_before_a_request_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    request = make_request("a", 7)
    scheduler.add(request)
    commit(scheduler.schedule())
    request.draft = RequestDraft([5, 6])
    plan = scheduler.schedule()
    assert summary(plan) == [("a", 1, 0)]
    assert plan.num_preempted == 0


def test_a_draft_is_shortened_to_the_blocks_that_are_left() -> None:
    """Dropped as a whole, drafts would be kept or not by their length, which can depend on the tokens drawn."""
    for length in (2, 3, 4, 5):
        scheduler = make_scheduler(num_blocks=3, block_size=4)
        request = make_request("a", 8)
        scheduler.add(request)
        commit(scheduler.schedule())
        request.draft = RequestDraft([5, 6, 7, 8, 9][:length])
        plan = scheduler.schedule()
        assert plan.scheduled[0].draft.token_ids == [5, 6, 7][:length]
        assert plan.num_preempted == 0


def test_the_youngest_is_preempted_and_returns_first() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    first, second = make_request("a", 8, 1), make_request("b", 7, 2)
    scheduler.add(first)
    scheduler.add(second)
    commit(scheduler.schedule())
    third = make_request("c", 1, 3)
    scheduler.add(third)
    plan = scheduler.schedule()
    assert summary(plan) == [("a", 1, 0)]
    assert plan.num_preempted == 1
    assert second.phase is Phase.WAITING
    assert second.block_ids == []
    assert second.num_computed_tokens == 0
    commit(plan)
    scheduler.finish(first)
    assert summary(scheduler.schedule()) == [("b", 8, 0), ("c", 1, 0)]


def test_priority_orders_waiting_requests() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("late", 4, 1, priority=5))
    scheduler.add(make_request("soon", 4, 2, priority=0))
    assert summary(scheduler.schedule()) == [("soon", 4, 0)]


def test_no_more_requests_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(seqs=2, budget=64)
    for i in range(5):
        scheduler.add(make_request(str(i), 2, i))
    assert len(scheduler.schedule().scheduled) == 2
    assert len(scheduler.waiting) == 3


def test_lookahead_slots_are_reserved_behind_a_draft() -> None:
    kv_cache = KVCacheManager(64, 4, enable_prefix_caching=False)
    scheduler = Scheduler(kv_cache, max_num_seqs=2, max_num_batched_tokens=16, num_lookahead_slots=6)
    request = make_request("a", 3)
    scheduler.add(request)
    commit(scheduler.schedule())
    request.draft = RequestDraft([5, 6])
    scheduler.schedule()
    assert len(request.block_ids) * 4 >= 3 + 1 + 2 + 6


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_blocks_return_after_finish_whatever_was_accepted(accepted: int) -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=2)
    requests = [make_request(str(i), 3, i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        commit(scheduler.schedule(), accepted)
        for request in requests:
            request.draft = RequestDraft([1, 2, 3])
    for request in requests:
        scheduler.finish(request)
        scheduler.finish(request)
    assert scheduler.kv_cache.num_free_blocks == 16
    assert not scheduler.has_work


def lookahead_scheduler(num_blocks: int, slots: int, max_model_len: int | None = None) -> Scheduler:
    kv_cache = KVCacheManager(num_blocks, 4, enable_prefix_caching=False)
    return Scheduler(
        kv_cache,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_lookahead_slots=slots,
        max_model_len=max_model_len,
    )


def test_lookahead_is_reserved_behind_every_share_that_samples() -> None:
    """Drafting after the first token writes there as well; a prefill chunk needs none."""
    scheduler = lookahead_scheduler(64, 5)
    request, chunked = make_request("a", 7), make_request("b", 100, order=1)
    scheduler.add(request)
    scheduler.add(chunked)
    plan = scheduler.schedule()
    assert [share.samples for share in plan.scheduled] == [True, False]
    assert len(request.block_ids) == 3
    assert len(chunked.block_ids) == -(-57 // 4)
    assert scheduler.has_lookahead(request)


def test_without_room_for_lookahead_requests_run_but_get_no_draft() -> None:
    """No request is preempted, and no draft dropped, for slots that only a further draft would use."""
    scheduler = lookahead_scheduler(3, 5)
    request, other = make_request("a", 3), make_request("b", 3, order=1)
    scheduler.add(request)
    scheduler.add(other)
    assert summary(scheduler.schedule()) == [("a", 3, 0), ("b", 3, 0)]
    assert scheduler.has_lookahead(request)
    assert not scheduler.has_lookahead(other)


def test_lookahead_ends_with_the_longest_text() -> None:
    """A cache that holds exactly one longest text serves it with lookahead slots."""
    scheduler = lookahead_scheduler(2, 5, max_model_len=8)
    request = make_request("a", 7)
    scheduler.add(request)
    commit(scheduler.schedule())
    assert len(request.block_ids) == 2
    assert scheduler.has_lookahead(request)
    assert summary(scheduler.schedule()) == [("a", 1, 0)]
