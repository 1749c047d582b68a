"""Sums of step statistics: right, finite, cheap."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.metrics import EngineStats, RequestStats, SpecCounter, StatsAccumulator, StepStats
from specdec.types import SpecStats

drafts = st.lists(
    st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=30
)


def finite(stats):
    return all(math.isfinite(value) for value in stats.as_dict().values() if isinstance(value, float))


@pytest.mark.parametrize(
    "stats",
    [
        EngineStats(),
        StatsAccumulator().engine_stats(),
        EngineStats(num_steps=5, num_generated_tokens=5, total_blocks=4, free_blocks=4),
        EngineStats(num_drafts=1),
    ],
)
def test_nothing_divides_by_zero(stats):
    assert finite(stats)
    assert stats.acceptance_rate == 0.0
    assert stats.mean_acceptance_length == 1.0
    assert stats.kv_usage == 0.0
    assert StepStats().spec.acceptance_rate == 0.0
    json.dumps(stats.as_dict(), allow_nan=False)


def test_positions_of_a_tree_are_depths():
    """Two roots, three children, one grandchild; then a chain given as a tree, and one that is none."""
    counter = SpecCounter()
    counter.count(6, 2, [-1, -1, 0, 1, 1, 3])
    assert counter.snapshot().num_draft_tokens_per_pos == (2, 3, 1)
    assert counter.snapshot().num_accepted_tokens_per_pos == (1, 1, 0)
    counter.count(4, 3, [-1, 0, 1, 2])
    counter.count(4, 3)
    stats = counter.snapshot()
    assert stats.num_draft_tokens_per_pos == (4, 5, 3, 2)
    assert stats.num_accepted_tokens_per_pos == (3, 3, 2, 0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 14, 8)
    assert stats.acceptance_rate_per_pos == (1.0, 1.0, 2 / 3, 0.0)


@given(drafts)
def test_invariants_of_counts(pairs):
    """Known fault 74 and invariant I9: parts sum to the whole, and later positions are accepted no more often."""
    counter = SpecCounter()
    for drafted, accepted in pairs:
        counter.count(drafted, accepted)
    stats = counter.snapshot()
    assert stats.num_drafts == sum(d > 0 for d, _ in pairs)
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens == sum(a for _, a in pairs)
    assert sum(stats.num_draft_tokens_per_pos) == stats.num_draft_tokens == sum(d for d, _ in pairs)
    assert list(stats.num_accepted_tokens_per_pos) == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    per_position = zip(stats.num_accepted_tokens_per_pos, stats.num_draft_tokens_per_pos, strict=True)
    assert all(a <= d for a, d in per_position)
    assert 0.0 <= stats.acceptance_rate <= 1.0
    assert all(0.0 <= rate <= 1.0 for rate in stats.acceptance_rate_per_pos)


def test_acceptance_length_includes_the_bonus_token():
    counter = SpecCounter()
    counter.count(4, 4)
    counter.count(4, 0)
    assert counter.snapshot().mean_acceptance_length == 3.0
    assert counter.snapshot().acceptance_rate_per_pos == (0.5, 0.5, 0.5, 0.5)


def test_forced_tokens_are_counted_apart():
    counter, total = SpecCounter(), SpecCounter()
    counter.count(0, 0)
    counter.count_forced(3, 2)
    total.add_stats(counter.snapshot())
    total.add_stats(counter.snapshot())
    assert (total.snapshot().num_grammar_forced_tokens, total.snapshot().num_grammar_accepted_tokens) == (6, 4)
    assert (total.snapshot().num_drafts, total.snapshot().mean_acceptance_length) == (0, 1.0)


def make_step(drafted=(2, 1), accepted=(1, 0)):
    return StepStats(
        num_requests=2,
        num_tokens=5,
        num_generated_tokens=3,
        num_drafts=2,
        num_draft_tokens_per_pos=drafted,
        num_accepted_tokens_per_pos=accepted,
        propose_seconds=0.001,
        target_seconds=0.01,
        verify_seconds=0.002,
        rest_seconds=0.003,
        num_preemptions=1,
        num_running=2,
        kv_usage=0.25,
    )


def test_steps_are_summed():
    total = StatsAccumulator()
    total.add(make_step())
    total.add(make_step((2, 1, 1), (2, 1, 1)))
    total.add(StepStats(num_requests=1, num_tokens=9, num_prompt_tokens=9, num_cached_tokens=16))
    stats = total.engine_stats(free_blocks=3, total_blocks=4, num_proposer_faults=2, speculation_disabled=True)
    assert (stats.num_steps, stats.num_generated_tokens, stats.num_preemptions) == (3, 6, 2)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (9, 16)
    assert stats.num_draft_tokens_per_pos == (4, 2, 1)
    assert stats.num_accepted_tokens_per_pos == (3, 1, 1)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 7, 5)
    assert stats.step_seconds == pytest.approx(0.032)
    assert stats.kv_usage == 0.25
    assert stats.num_proposer_faults == 2
    assert stats.speculation_disabled
    assert stats.spec == SpecStats(
        num_drafts=4,
        num_draft_tokens=7,
        num_accepted_tokens=5,
        num_accepted_tokens_per_pos=(3, 1, 1),
        num_draft_tokens_per_pos=(4, 2, 1),
    )


def test_a_step_shows_its_speculation():
    spec = make_step().spec
    assert (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (2, 3, 1)
    assert spec.mean_acceptance_length == 1.5
    assert spec.target_seconds == 0.01


def test_differences_between_two_moments():
    total = StatsAccumulator()
    total.add(make_step((2,), (1,)))
    earlier = total.engine_stats(free_blocks=9, total_blocks=10)
    total.add(make_step())
    later = total.engine_stats(free_blocks=4, total_blocks=10)
    between = later.since(earlier)
    assert between.num_steps == 1
    assert between.num_draft_tokens_per_pos == (2, 1)
    assert (between.free_blocks, between.total_blocks) == (4, 10)
    assert earlier.since(earlier).mean_acceptance_length == 1.0
    again = earlier.plus(between)
    assert (again.num_drafts, again.num_draft_tokens, again.free_blocks) == (
        later.num_drafts,
        later.num_draft_tokens,
        4,
    )
    assert between.plus(earlier).num_draft_tokens_per_pos == later.num_draft_tokens_per_pos


def test_adding_a_step_is_cheap():
    """Under 10 microseconds of this thread's time a step; the best of several runs, since caches may be cold."""
    step = make_step((64, 60, 50, 40, 30), (50, 40, 30, 20, 10))
    best = math.inf
    for _ in range(20):
        total = StatsAccumulator()
        begin = time.thread_time()
        for _ in range(200):
            total.add(step)
        best = min(best, (time.thread_time() - begin) / 200)
    assert best < 10e-6


def test_time_per_output_token_counts_the_tokens_after_the_first():
    ended = RequestStats(finish_reason="stop", num_output_tokens=5, first_token_seconds=1.0, total_seconds=3.0)
    assert ended.time_per_output_token == 0.5
    assert RequestStats(finish_reason="abort").time_per_output_token is None
    assert (
        RequestStats(finish_reason="length", num_output_tokens=1, first_token_seconds=1.0).time_per_output_token is None
    )
