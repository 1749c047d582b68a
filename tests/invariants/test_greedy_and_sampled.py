"""I1, I2, I7: the output is plain decoding's, whoever drafts, however many tokens, whoever shares the batch."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SamplingParams
from specdec.testing import SelfProposer, WrongProposer
from tests.invariants.kit import (
    BACKENDS,
    ESSENTIAL,
    METHODS,
    OBJECTS,
    PROMPTS,
    Baseline,
    Runs,
    Speculation,
    Start,
    first_of,
    kv_bytes_per_token,
    oracle,
    reasons,
    speculating,
    tokens,
)

GREEDY = SamplingParams(temperature=0, max_tokens=48)


def seeded(**rest: Any) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, seed=100 + i, max_tokens=40, **rest) for i in range(len(PROMPTS))]


@speculating(*OBJECTS, *METHODS)
@pytest.mark.parametrize("k", first_of(4, 1))
def test_greedy_equals_plain(start: Start, baseline: Baseline, speculation: Speculation, k: int) -> None:
    """I1 and I4, alone and in a batch."""
    engine = start(**speculation(k))
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    alone = engine.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert tokens(alone) == tokens(baseline(PROMPTS[1:2], GREEDY))


@speculating(*OBJECTS, *METHODS)
@pytest.mark.parametrize("k", [3])
def test_sampled_equals_plain_for_the_same_seed(
    start: Start, baseline: Baseline, speculation: Speculation, k: int
) -> None:
    """I2 and I7 by equality: the noise of a token depends on seed, position and token alone."""
    engine = start(**speculation(k))
    assert tokens(engine.generate(PROMPTS, seeded(), use_tqdm=False)) == tokens(baseline(PROMPTS, seeded()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", first_of(4, 1, 16))
def test_backends_and_block_sizes(start: Start, baseline: Baseline, runs: Runs, backend: str, block_size: int) -> None:
    engine = start(oracle(runs, 2), attention_backend=backend, block_size=block_size)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert tokens(engine.generate(PROMPTS, seeded(), use_tqdm=False)) == tokens(baseline(PROMPTS, seeded()))


@speculating(*ESSENTIAL)
@pytest.mark.parametrize("budget", first_of(8, 3, 32))
def test_chunked_prefill(start: Start, baseline: Baseline, speculation: Speculation, budget: int) -> None:
    """Budgets so small that prompts come in chunks and requests are skipped in some steps."""
    engine = start(**speculation(4), max_num_batched_tokens=budget)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))


@speculating(*ESSENTIAL)
@pytest.mark.parametrize("blocks", first_of(16, 22))
def test_preemption(start: Start, baseline: Baseline, speculation: Speculation, blocks: int) -> None:
    """Known bug 41: a pool for few of the requests; preempted ones start over and say the same."""
    memory = blocks * 8 * kv_bytes_per_token(start(**speculation(4)))
    engine = start(**speculation(4), block_size=8, kv_cache_memory=memory, max_model_len=128)
    assert engine.stats().total_blocks == blocks
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert tokens(engine.generate(PROMPTS, seeded(), use_tqdm=False)) == tokens(baseline(PROMPTS, seeded()))
    assert engine.stats().num_preemptions > 0


@speculating(*ESSENTIAL)
def test_prefix_cache(start: Start, baseline: Baseline, speculation: Speculation) -> None:
    """A second round finds its prompts in the cache and says the same.

    Proposers whose own K/V look at the next token (EAGLE) give back the last block, of 16 tokens.
    """
    engine = start(**speculation(4))
    first = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    second = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(first) == tokens(second) == tokens(baseline(PROMPTS, GREEDY))
    drafting = engine._engine.core.parts.drafting
    gives_back = drafting is not None and drafting.proposer.needs.next_token
    assert second[4].num_cached_tokens == (48 if gives_back else 64)
    without = start(**speculation(4), enable_prefix_caching=False)
    assert tokens(without.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(first)


@speculating(*ESSENTIAL)
def test_penalties_and_filters(start: Start, baseline: Baseline, speculation: Speculation) -> None:
    """Options that look at drafted tokens bite the same way (known bugs 14, 16, 17)."""
    options: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"logit_bias": {7: -100.0, 21: 3.0}},
        {"min_p": 0.2},
        {"top_k": 3, "top_p": 0.8},
        {"allowed_token_ids": [5, 6, 7, 8, 9]},
        {"min_tokens": 8, "stop_token_ids": [*range(60)]},
    ]
    greedy = [SamplingParams(temperature=0, max_tokens=24, **o) for o in options]
    sampled = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, **o) for i, o in enumerate(options)]
    engine = start(**speculation(4))
    for params in (greedy, sampled):
        plain = baseline(PROMPTS, params)
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        assert tokens(outputs) == tokens(plain)
        assert reasons(outputs) == reasons(plain)
    assert tokens(baseline(PROMPTS[:1], greedy[0])) != tokens(baseline(PROMPTS[:1], greedy[1]))


def test_prompt_lengths_up_to_the_draft_length(start: Start, baseline: Baseline) -> None:
    """Known bug 52: a prompt of 1 + k tokens is not a verify step."""
    prompts = [[9, 4, 9, 4, 9, 4, 9, 4, 9, 4][:n] for n in range(1, 11)]
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = tokens(baseline(prompts, params))
    for k in range(1, 7):
        engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1})
        assert tokens(engine.generate(prompts, params, use_tqdm=False)) == plain
        for prompt, expected in zip(prompts, plain, strict=True):
            assert tokens(engine.generate(prompt, params, use_tqdm=False)) == [expected]


def test_self_draft_is_always_accepted(start: Start, model: str) -> None:
    """Known bugs 6 and 10: the draft is the target's own continuation."""
    params = SamplingParams(temperature=0, max_tokens=40)
    for k in (1, 4):
        engine = start(SelfProposer(model), k=k)
        output = engine.generate(PROMPTS[1], params, use_tqdm=False)[0]
        stats = output.spec_stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
        assert engine.stats().num_steps == 1 + -(-(40 - 1) // (k + 1))


def test_acceptance_does_not_depend_on_neighbours(start: Start, model: str) -> None:
    """Known bug 76."""
    to_the_end = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for count in (1, 4, 8):
        engine = start(SelfProposer(model), k=3)
        outputs = engine.generate(PROMPTS[:count], to_the_end, use_tqdm=False)
        assert all(o.spec_stats.num_accepted_tokens == o.spec_stats.num_draft_tokens > 0 for o in outputs)


def test_a_wrong_draft_never_shows(start: Start, baseline: Baseline) -> None:
    """Known bug 8: an id that plain decoding never emits is drafted at every step."""
    emitted = {t for ids in tokens(baseline(PROMPTS, GREEDY)) for t in ids}
    never = next(t for t in range(128) if t not in emitted)
    engine = start(WrongProposer(never))
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == tokens(baseline(PROMPTS, GREEDY))
    assert engine.stats().num_accepted_tokens == 0
    assert engine.stats().num_draft_tokens > 0


def test_unseeded_requests_differ_and_seeded_ones_repeat(start: Start) -> None:
    """Known bugs 11 and 13."""
    engine = start(WrongProposer(1))
    unseeded = SamplingParams(temperature=1.5, max_tokens=10)
    seen = {tuple(engine.generate(PROMPTS[2], unseeded, use_tqdm=False)[0].outputs[0].token_ids) for _ in range(20)}
    assert len(seen) >= 15
    with_seed = SamplingParams(temperature=2.0, seed=42, max_tokens=10)
    same = {tuple(engine.generate(PROMPTS[2], with_seed, use_tqdm=False)[0].outputs[0].token_ids) for _ in range(5)}
    assert len(same) == 1
    other = SamplingParams(temperature=2.0, seed=43, max_tokens=10)
    assert tuple(engine.generate(PROMPTS[2], other, use_tqdm=False)[0].outputs[0].token_ids) not in same


def test_several_choices(start: Start, baseline: Baseline) -> None:
    """Known bug 19: n choices with a neighbour in the batch."""
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    many = SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=8)
    one = SamplingParams(temperature=0, max_tokens=8)
    first, second = engine.generate(PROMPTS[:2], [many, one], use_tqdm=False)
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 4
    assert tokens([second]) == tokens(baseline(PROMPTS[1:2], one))


def test_priority_changes_order_not_output(start: Start, baseline: Baseline) -> None:
    engine = start(scheduling_policy="priority", max_num_seqs=1)
    outputs = engine.generate(PROMPTS[:3], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    assert tokens(outputs) == tokens(baseline(PROMPTS[:3], GREEDY))
    ends = [output.timings.total for output in outputs]
    assert ends[0] > ends[1] > ends[2]  # type: ignore[operator]


def test_runs_to_the_model_length(start: Start) -> None:
    """Known bug 47: no max_tokens, prompts that leave room for few tokens."""
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_model_len=64)
    for room in range(1, 7):
        prompt = [5, 6] * 32
        output = engine.generate(prompt[: 64 - room], SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
        assert len(output[0].outputs[0].token_ids) == room
        assert output[0].outputs[0].finish_reason == "length"
