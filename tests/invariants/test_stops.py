"""I3, I4 and class C: a run of accepted tokens ends where plain decoding ends."""

from __future__ import annotations

import pytest

from specdec import SamplingParams
from tests.invariants.kit import PROMPTS, Baseline, Runs, Speculation, Start, oracle, reasons, speculating, tokens

PROMPT = PROMPTS[4]


def greedy(**rest: object) -> SamplingParams:
    return SamplingParams(temperature=0, **({"max_tokens": 16} | rest))  # type: ignore[arg-type]


@pytest.fixture
def emitted(baseline: Baseline) -> list[int]:
    """The plain greedy continuation, of which any token can be declared a stop (trick T1)."""
    return baseline([PROMPT], greedy())[0].outputs[0].token_ids


def first_with_new_token(ids: list[int], start: int) -> int:
    """The first index from ``start`` on whose token has not occurred before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


@pytest.mark.parametrize("position", range(6))
def test_a_stop_id_anywhere_in_the_run(start: Start, runs: Runs, emitted: list[int], position: int) -> None:
    """Known bugs 20 and 22: tokens behind a stop in the middle of a run never existed."""
    index = first_with_new_token(emitted, position)
    engine = start(oracle(runs), k=4)
    choice = engine.generate(PROMPT, greedy(stop_token_ids=[emitted[index]]), use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == emitted[: index + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", emitted[index])


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_max_tokens_anywhere_in_the_run(start: Start, runs: Runs, emitted: list[int], max_tokens: int) -> None:
    """Known bug 28: what is delivered, counted and generated is the same number."""
    engine = start(oracle(runs), k=4)
    choice = engine.generate(PROMPT, greedy(max_tokens=max_tokens), use_tqdm=False)[0].outputs[0]
    assert choice.token_ids == emitted[:max_tokens]
    assert choice.finish_reason == "length"
    assert len(choice.token_origins) == max_tokens
    assert engine.stats().num_generated_tokens == max_tokens


def test_a_stop_before_the_cap_wins_and_one_beyond_it_does_not(start: Start, runs: Runs, emitted: list[int]) -> None:
    """Known bug 20: stop at the third token and cap at the fifth, in one run."""
    engine = start(oracle(runs), k=5)
    ids = [*emitted]
    third, fifth, sixth = (first_with_new_token(ids, i) for i in (2, 4, 5))
    for index, cap in ((third, third + 3), (fifth, fifth + 1), (sixth, sixth)):
        params = greedy(stop_token_ids=[ids[index]], max_tokens=cap)
        choice = engine.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
        assert choice.finish_reason == ("stop" if index < cap else "length")
        assert len(choice.token_ids) == min(index + 1, cap)


def test_min_tokens_inside_a_run(start: Start, baseline: Baseline, runs: Runs, emitted: list[int]) -> None:
    """Known bug 17: a stop id that is drafted too early cannot be accepted."""
    params = greedy(stop_token_ids=[emitted[2]], min_tokens=8)
    plain = baseline([PROMPT], params)
    output = start(oracle(runs), k=4).generate(PROMPT, params, use_tqdm=False)
    assert tokens(output) == tokens(plain)
    assert len(tokens(output)[0]) >= 8
    assert emitted[2] not in tokens(output)[0][:8]


@speculating("oracle_1", "random", "ngram", "eagle3")
def test_stop_strings(start: Start, baseline: Baseline, speculation: Speculation) -> None:
    """Known bugs 23 and 26: text, ids and log-probabilities end together, at the token that completes the string."""
    engine = start(**speculation(4))
    plain_text = baseline([PROMPT], greedy(max_tokens=24))[0].outputs[0].text
    pieces = {plain_text[i : i + n] for n in (1, 2, 3) for i in range(12)} - {""}
    for stop in sorted(pieces):
        for include in (False, True):
            params = greedy(max_tokens=24, stop=[stop], include_stop_str_in_output=include, logprobs=2)
            plain = baseline([PROMPT], params)
            output = engine.generate(PROMPT, params, use_tqdm=False)
            choice = output[0].outputs[0]
            assert tokens(output) == tokens(plain)
            assert reasons(output) == reasons(plain) == [("stop", stop)]
            assert choice.text == plain[0].outputs[0].text
            assert choice.text.endswith(stop) if include else stop not in choice.text
            assert choice.logprobs is not None
            assert len(choice.logprobs) == len(choice.token_ids) == len(choice.token_origins)


def test_ignore_eos_and_no_eos_at_all(start: Start, baseline: Baseline) -> None:
    """Known bug 25: the tiny model has no end-of-text token."""
    params = greedy(max_tokens=15, ignore_eos=True)
    engine = start(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    prompt = [11, 12, 13, 14, 15, 12, 13]
    output = engine.generate(prompt, params, use_tqdm=False)
    assert tokens(output) == tokens(baseline([prompt], params))
    assert len(tokens(output)[0]) == 15


def test_a_stop_token_id_outside_the_vocabulary_is_refused(start: Start) -> None:
    from specdec.errors import InvalidRequestError

    engine = start()
    with pytest.raises(InvalidRequestError, match="100000"):
        engine.generate(PROMPT, greedy(stop_token_ids=[100000]), use_tqdm=False)
    assert len(tokens(engine.generate(PROMPT, greedy(), use_tqdm=False))[0]) == 16
