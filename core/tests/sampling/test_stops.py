"""Where outputs end: the cases of stops and limits inside a run, and independence of how tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.params import SamplingParams
from specdec.sampling.stops import StopChecker, StopDecision

WORDS = ["a", "b", "ab", "STOP", "ST", "OP", " ", "x", "\n", "</s>", "aSTOPb"]
END = 9


class Words:
    """Token i is WORDS[i]; "</s>" is special."""

    is_fast = True

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **options: Any) -> str:
        return "".join(WORDS[t] for t in token_ids if not (skip_special_tokens and t == END))


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split(",")]


def checker(max_tokens: int = 100, eos: Sequence[int] = (END,), tokenizer: Any = None, **options: Any) -> StopChecker:
    params = SamplingParams(**{"max_tokens": None, **options})
    return StopChecker(
        params,
        prompt_token_ids=[0],
        tokenizer=tokenizer or Words(),
        eos_token_ids=frozenset(eos),
        max_tokens=max_tokens,
    )


def run_all(checker: StopChecker, runs: Sequence[Sequence[int]]) -> tuple[int, str, str | None, Any]:
    """Feed runs until a reason; the number of tokens kept, the text, and the reasons."""
    count, text = 0, ""
    for run in runs:
        decision = checker.check(run)
        count += decision.num_tokens
        text += decision.text
        if decision.finish_reason:
            return count, text, decision.finish_reason, decision.stop_reason
    return count, text + checker.finish(), None, None


def test_nothing_ends() -> None:
    assert checker().check(ids("a,b,x")) == StopDecision(3, "abx")


def test_an_end_token_inside_a_run() -> None:
    """Known bug 22, at every position of the run."""
    for position in range(5):
        run = ids("a,b,x,a,b")
        run[position] = END
        found = checker().check(run)
        assert found == StopDecision(position + 1, "abxab"[:position], "stop", None)


def test_a_stop_token_is_named_and_kept_out_of_the_text() -> None:
    found = checker(stop_token_ids=[WORDS.index("x")]).check(ids("a,x,b"))
    assert found == StopDecision(2, "a", "stop", WORDS.index("x"))
    found = checker(stop_token_ids=[WORDS.index("x")], include_stop_str_in_output=True).check(ids("a,x,b"))
    assert found == StopDecision(2, "ax", "stop", WORDS.index("x"))


def test_ignoring_end_tokens() -> None:
    """Known bug 25: several end tokens, none at all, or ignored ones."""
    assert checker(ignore_eos=True, max_tokens=2).check(ids("a,</s>,b")).finish_reason == "length"
    assert checker(eos=(), max_tokens=3).check(ids("a,</s>,b")).num_tokens == 3
    assert checker(eos=(END, 7)).check(ids("a,x,b")) == StopDecision(2, "a", "stop", None)
    named = checker(ignore_eos=True, stop_token_ids=[END]).check(ids("a,</s>,b"))
    assert (named.finish_reason, named.stop_reason) == ("stop", END)


@pytest.mark.parametrize("stop_at", [3, 5, 6])
@pytest.mark.parametrize("kind", ["string", "id"])
def test_stop_and_limit_in_one_run(stop_at: int, kind: str) -> None:
    """Known bug 20: the cap is 5; a stop at 3 or at 5 wins, one at 6 comes too late."""
    run = ids("a,b,a,b,a,b")
    run[stop_at - 1] = WORDS.index("x")
    options: dict[str, Any] = {"stop": ["x"]} if kind == "string" else {"stop_token_ids": [WORDS.index("x")]}
    found = checker(max_tokens=5, **options).check(run)
    assert found.num_tokens == min(stop_at, 5)
    assert found.finish_reason == ("stop" if stop_at <= 5 else "length")
    assert found.text == "ababa"[: min(stop_at - 1, 5)]


@pytest.mark.parametrize("cap", [5, 6, 7, 8, 9])
def test_a_limit_inside_a_run(cap: int) -> None:
    """Known bug 28: exactly as many tokens as the cap, in text and in count."""
    count, text, reason, _ = run_all(checker(max_tokens=cap), [ids("a,b,a,b"), ids("a,b,a,b"), ids("a,b")])
    assert (count, text, reason) == (cap, "ababababab"[:cap], "length")


def test_a_stop_string_over_several_tokens() -> None:
    """Known bugs 23 and 26: the ids end with the token that completes it, the text before it."""
    found = checker(stop=["STOP"]).check(ids("a,ST,OP,b"))
    assert found == StopDecision(3, "a", "stop", "STOP")
    found = checker(stop=["STOP"], include_stop_str_in_output=True).check(ids("a,ST,OP,b"))
    assert found == StopDecision(3, "aSTOP", "stop", "STOP")


def test_a_stop_string_inside_a_token() -> None:
    assert checker(stop=["STOP"]).check(ids("x,aSTOPb,b")) == StopDecision(2, "xa", "stop", "STOP")
    found = checker(stop=["STOP"], include_stop_str_in_output=True).check(ids("x,aSTOPb,b"))
    assert found == StopDecision(2, "xaSTOP", "stop", "STOP")


def test_partial_matches_are_held_back() -> None:
    follow = checker(stop=["STOP"])
    assert follow.check(ids("a,ST")) == StopDecision(2, "a")
    assert follow.check(ids("a")) == StopDecision(1, "STa")
    assert follow.check(ids("ST")) == StopDecision(1, "")
    assert follow.check(ids("ST")) == StopDecision(1, "ST")
    assert follow.check(ids("OP")) == StopDecision(1, "", "stop", "STOP")
    kept = checker(stop=["STOP"], include_stop_str_in_output=True)
    assert [kept.check([t]).text for t in ids("a,ST,OP")] == ["a", "ST", "OP"]


def test_held_text_comes_when_the_output_ends_otherwise() -> None:
    assert checker(stop=["STOP"], max_tokens=2).check(ids("a,ST,OP")) == StopDecision(2, "aST", "length", None)
    assert checker(stop=["STOP"]).check(ids("a,ST,</s>")) == StopDecision(3, "aST", "stop", None)
    aborted = checker(stop=["STOP"])
    assert aborted.check(ids("ST")).text == ""
    assert aborted.finish() == "ST"


def test_which_of_several_stop_strings() -> None:
    """The one that ends first; of those that end together, the one that begins first."""
    assert checker(stop=["TOP", "STOP"]).check(ids("a,STOP")) == StopDecision(2, "a", "stop", "STOP")
    assert checker(stop=["STOPb", "TO"]).check(ids("aSTOPb")) == StopDecision(1, "aS", "stop", "TO")
    assert checker(stop=["STOPb", "P"]).check(ids("a,ST,OP,b")) == StopDecision(3, "aSTO", "stop", "P")


def test_min_tokens_counts_tokens_for_every_kind_of_stop() -> None:
    for options in ({"stop": ["x"]}, {"stop_token_ids": [WORDS.index("x")]}):
        follow = checker(min_tokens=3, **options)
        assert follow.check(ids("x,a,x")).finish_reason is None
        assert follow.check(ids("x,a")).num_tokens == 1
    early = checker(min_tokens=2, stop=["abx"])
    assert early.check(ids("ab,x")).finish_reason is None
    # Begun before the minimum, completed after it: it counts.
    straddling = checker(min_tokens=2, stop=["abx"])
    assert straddling.check(ids("x,ab,x,a")) == StopDecision(3, "x", "stop", "abx")


def test_a_match_passed_over_is_not_found_again() -> None:
    follow = checker(min_tokens=3, stop=["ab", "abab\n"])
    assert follow.check(ids("x,ab,x")).finish_reason is None
    assert follow.check(ids("x")).finish_reason is None
    longer = checker(min_tokens=2, stop=["b", "abx"])
    assert longer.check(ids("a,b")).finish_reason is None
    assert longer.check(ids("a")) == StopDecision(1, "ab")  # "ab" could have begun "abx"; "a" still can


def test_without_text() -> None:
    assert checker(detokenize=False).check(ids("a,b")) == StopDecision(2, "")
    silent = StopChecker(
        SamplingParams(max_tokens=None), prompt_token_ids=[], tokenizer=None, eos_token_ids=frozenset({9}), max_tokens=5
    )
    assert silent.check(ids("a,</s>,b")) == StopDecision(2, "", "stop", None)


def test_spaces_and_newlines_as_stops() -> None:
    assert checker(stop="\n").check(ids("a,\n,b")) == StopDecision(2, "a", "stop", "\n")


class Bytes:
    """Token i is the byte i: characters are spread over tokens."""

    is_fast = True

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_a_stop_string_of_characters_spread_over_tokens() -> None:
    text = "ok 🙂🇩🇪 end".encode()
    follow = checker(stop=["🇩🇪"], tokenizer=Bytes(), eos=())
    found = follow.check(list(text))
    assert found.text == "ok 🙂"
    assert found.num_tokens == len("ok 🙂🇩🇪".encode())


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 20), max_size=6),
    stop=st.lists(st.sampled_from(["STOP", "ab", "b", "aba", "P", "\n", "x x", "TOPb"]), max_size=3),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 20),
    include=st.booleans(),
    stop_ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=1),
)
def test_runs_are_as_good_as_single_tokens(
    tokens: list[int],
    cuts: list[int],
    stop: list[str],
    min_tokens: int,
    max_tokens: int,
    include: bool,
    stop_ids: list[int],
) -> None:
    """The same end, text and reason however the tokens are grouped, and what they mean."""
    options = {
        "stop": stop,
        "min_tokens": min_tokens,
        "stop_token_ids": stop_ids,
        "include_stop_str_in_output": include,
    }
    ends = sorted({0, len(tokens), *(c for c in cuts if c < len(tokens))})
    runs = [tokens[a:b] for a, b in pairwise(ends)]
    together = run_all(checker(max_tokens, **options), runs)
    single = run_all(checker(max_tokens, **options), [[t] for t in tokens])
    assert together == single
    count, text, reason, found = together
    words = [WORDS[t] if t != END else "" for t in tokens[:count]]
    if reason is None or reason == "length":
        assert text == "".join(words)
    elif isinstance(found, str):
        before = "".join(words[:-1])
        whole = before + words[-1]
        place = whole.find(found, max(0, len(before) - len(found) + 1))
        assert text == whole[: place + len(found) if include else place]
        assert count > min_tokens
    else:
        assert text == "".join(words if include else words[:-1])
        assert count > min_tokens
