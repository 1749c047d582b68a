"""The drafts equal a naive search, whatever the text and however it is shown; and they come fast."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.testing.reference import ngram_reference
from specdec.testing.strategies import growing_texts, lookup_windows, texts
from specdec.types import Draft, ProposalInput
from specdec_ngram import index
from specdec_ngram.ngram import NgramProposer

torch.set_num_threads(1)


def make(shortest: int, longest: int, k: int = 4) -> NgramProposer:
    return NgramProposer(prompt_lookup_min=shortest, prompt_lookup_max=longest, num_speculative_tokens=k)


def ask(proposer: NgramProposer, texts: dict[str, np.ndarray], limits: Sequence[int] | int) -> Draft:
    limits = [limits] * len(texts) if isinstance(limits, int) else limits
    return proposer.propose(
        ProposalInput(
            request_ids=tuple(texts),
            token_ids=tuple(texts.values()),
            max_draft_tokens=np.array(limits, dtype=np.int32),
        )
    )


def draft(proposer: NgramProposer, tokens: Sequence[int], limit: int = 4, request_id: str = "a") -> list[int]:
    return ask(proposer, {request_id: np.array(tokens, dtype=np.int64)}, limit).token_ids.tolist()


# --- what is proposed ---------------------------------------------------------------------------


def test_longest_match_decides() -> None:
    """A longer match that is older beats a shorter one."""
    assert draft(make(1, 3), [1, 2, 3, 7, 7, 3, 8, 8, 1, 2, 3], 1) == [7]
    assert draft(make(1, 1), [1, 2, 3, 7, 7, 3, 8, 8, 1, 2, 3], 1) == [8]


def test_latest_full_continuation() -> None:
    """Of equal matches the latest that has as many tokens after it as can be used is copied."""
    text = [5, 6, 1, 1, 1, 5, 6, 2, 2, 2, 5, 6, 3, 5, 6]
    assert draft(make(2, 2), text, 4) == [2, 2, 2, 5]
    assert draft(make(2, 2), text, 3) == [3, 5, 6]
    assert draft(make(2, 2), text, 1) == [3]


def test_earliest_when_none_is_full() -> None:
    """When every match is near the end, the earliest gives most."""
    assert draft(make(1, 1), [9, 1, 8, 1], 4) == [8, 1]
    assert draft(make(1, 1), [1, 1, 1], 4) == [1, 1]


def test_no_match() -> None:
    """Shorter matches than the minimum do not count, and a text of one token has none."""
    assert draft(make(2, 4), [1, 2, 3, 2], 4) == []
    assert draft(make(1, 4), [1], 4, "b") == []


def test_known_case() -> None:
    """Three drafts after 12, 13 came again."""
    assert draft(make(2, 2, 3), [11, 12, 13, 14, 15, 12, 13], 3) == [14, 15, 12]


@settings(deadline=None, max_examples=300)
@given(st.lists(growing_texts(5), min_size=1, max_size=4), lookup_windows(), st.integers(1, 6), st.data())
def test_equals_reference(
    shown: list[tuple[np.ndarray, list[int]]], window: tuple[int, int], k: int, data: st.DataObject
) -> None:
    """Texts that grow side by side get the naive search's drafts at every step, with any limit."""
    proposer = make(*window, k)
    for step in range(max(len(lengths) for _, lengths in shown)):
        now = {f"r{i}": text[: lengths[step]] for i, (text, lengths) in enumerate(shown) if step < len(lengths)}
        limits = [data.draw(st.integers(0, k)) for _ in now]
        got = ask(proposer, now, limits)
        rows = torch.split(got.token_ids, got.num_draft_tokens.tolist())
        for text, limit, row in zip(now.values(), limits, rows, strict=True):
            assert row.tolist() == ngram_reference(text.tolist(), *window, limit)


def test_equals_reference_on_random_arrays() -> None:
    """500 arrays: random and periodic, small and large vocabularies, windows narrow and wide."""
    rng = np.random.default_rng(0)
    for case in range(500):
        length = int(rng.integers(2, 150))
        text = rng.integers(0, rng.choice([1, 2, 5, 50]), length)
        if case % 3 == 0:
            text = np.resize(text[: 1 + length // 8], length)
        shortest = int(rng.integers(1, 6))
        longest = shortest + int(rng.choice([0, 1, 3, 60]))
        k = int(rng.integers(1, 8))
        proposer = make(shortest, longest, k)
        for end in sorted({int(rng.integers(1, length + 1)), length}):
            want = ngram_reference(text[:end].tolist(), shortest, longest, k)
            assert draft(proposer, text[:end].tolist(), k) == want


# --- what is kept -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(texts(4, max_size=40), min_size=2, max_size=4), lookup_windows(4))
def test_text_that_got_shorter(shown: list[np.ndarray], window: tuple[int, int]) -> None:
    """A text that is shorter than it was is indexed anew, whatever is in it."""
    proposer = make(*window)
    room = 41
    for text in shown:
        tokens = text[: room - 1].tolist()
        if tokens:
            assert draft(proposer, tokens) == ngram_reference(tokens, *window, 4)
            room = len(tokens)


def test_another_text_of_the_same_length() -> None:
    """A text that differs at the end of what is indexed is indexed anew."""
    proposer = make(1, 2)
    draft(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 1])
    assert draft(proposer, [9, 2, 3, 4, 6, 7, 7, 8, 9]) == [2, 3, 4, 6]


def test_index_outgrows_its_room() -> None:
    """A text many times as long as at the first step is served all the same."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 30, 3000)
    proposer = make(2, 5)
    for end in range(10, 3000, 37):
        assert draft(proposer, text[:end].tolist()) == ngram_reference(text[:end].tolist(), 2, 5, 4)


def test_memory_is_bounded_and_given_back() -> None:
    """At most 64 bytes a token at first, in proportion to the text; none after the end."""
    proposer = make(2, 4)
    rng = np.random.default_rng(2)
    for length in (1000, 10_000):
        ask(proposer, {str(length): rng.integers(0, 1000, length)}, 4)
    assert sum(proposer.memory().values()) < 64 * 11_000 + 8192
    for length in (1000, 10_000):
        proposer.finish(str(length))
    assert sum(proposer.memory().values()) == 0


def test_rows_are_used_again() -> None:
    """Requests that come and go do not make the state grow."""
    proposer = make(1, 2)
    for step in range(200):
        ids = [f"r{step + i}" for i in range(5)]
        assert ask(proposer, {name: np.array([1, 2, 1]) for name in ids}, 2).token_ids.tolist() == [2, 1] * 5
        proposer.finish(ids[0])
    assert len(proposer._state) <= 16


def test_equal_hashes_are_told_apart() -> None:
    """Two n-grams with the same hash are different n-grams: the tokens are compared."""
    apart = int(index._HASH_BASE)
    pairs = [(5, 7), (6, 7 - apart)]
    with np.errstate(over="ignore"):
        hashes = [index._suffix_hash.py_func(np.array(pair, dtype=np.int64), 1, 2) for pair in pairs]
    assert hashes[0] == hashes[1]
    first, second = pairs
    text = [*first, 1, 2, 3, 4, *second]
    assert draft(make(2, 2), text) == []
    assert draft(make(2, 2), [*text, 8, 8, 8, 8, *first]) == [1, 2, 3, 4]


def test_pointers_given_by_the_engine() -> None:
    """Addresses that the engine knows save asking NumPy and change nothing."""
    texts = [np.array([1, 2, 3, 1, 2]), np.array([4, 4, 5, 4, 4])]
    batch = ProposalInput(
        request_ids=("a", "b"),
        token_ids=tuple(texts),
        max_draft_tokens=np.array([2, 2], dtype=np.int32),
        token_pointers=np.array([text.ctypes.data for text in texts]),
        num_tokens=np.array([5, 5]),
    )
    got = make(1, 2).propose(batch)
    assert got.token_ids.tolist() == ask(make(1, 2), dict(zip("ab", texts, strict=True)), 2).token_ids.tolist()


def test_tokens_of_another_type() -> None:
    """Memory is read by address, so anything but contiguous int64 is refused."""
    for tokens in (np.zeros(4, dtype=np.int32), np.zeros(8, dtype=np.int64)[::2]):
        with pytest.raises(TypeError, match="contiguous int64"):
            ask(make(1, 2), {"a": tokens}, 2)


def test_earlier_drafts_stay_as_they_were() -> None:
    """A draft does not share memory with the next one."""
    proposer = make(1, 2)
    first = ask(proposer, {"a": np.array([1, 2, 3, 1])}, 2)
    ask(proposer, {"a": np.array([1, 2, 3, 1, 3, 3, 3, 3])}, 2)
    assert first.token_ids.tolist() == [2, 3]
    assert first.num_draft_tokens.tolist() == [2]


# --- what it costs ------------------------------------------------------------------------------
# CPU time, of one thread: other work on the machine does not count.


def seconds(window: tuple[int, int], length: int, batch: int = 1) -> float:
    """Best of several first steps of fresh requests, per request."""
    rng = np.random.default_rng(length)
    texts = {f"r{i}": rng.integers(0, 32_000, length) for i in range(batch)}
    best = 1.0
    for _ in range(5):
        proposer = make(*window, 5)
        begin = time.process_time()
        ask(proposer, texts, 5)
        best = min(best, time.process_time() - begin)
    return best / batch


@pytest.mark.parametrize("window", [(2, 5), (10, 500)])
@pytest.mark.parametrize("batch", [1, 32])
def test_long_prompts(window: tuple[int, int], batch: int) -> None:
    """Known bug 89: a first step with 50,000 random tokens takes under 5 ms, and time grows with length alone."""
    make(*window).load(None)
    long, short = seconds(window, 50_000, batch), seconds(window, 25_000, batch)
    assert long < 5e-3
    assert long < 2.5 * short + 0.5e-3


def test_cost_of_a_step() -> None:
    """64 requests of 4,000 tokens: under 0.3 ms a step, and about the same at 1,000."""
    make(2, 4).load(None)
    rng = np.random.default_rng(3)

    def step_seconds(length: int) -> float:
        texts = [rng.integers(0, 3000, length + 300) for _ in range(64)]
        pointers = np.array([text.ctypes.data for text in texts])
        ids = tuple(f"r{i}" for i in range(64))
        proposer, times = make(2, 4, 5), []
        for step in range(60):
            now = length + 3 * step
            batch = ProposalInput(
                request_ids=ids,
                token_ids=tuple(text[:now] for text in texts),
                max_draft_tokens=np.full(64, 5, dtype=np.int32),
                token_pointers=pointers,
                num_tokens=np.full(64, now),
            )
            begin = time.process_time()
            proposer.propose(batch)
            times.append(time.process_time() - begin)
        return float(np.quantile(times, 0.25))

    assert step_seconds(4000) < 0.3e-3
    assert step_seconds(4000) < 2 * step_seconds(1000) + 0.05e-3


DECODE = """
import sys
from specdec import LLM
options = {"method": "ngram", "num_speculative_tokens": 3}
with LLM(sys.argv[1], dtype="bfloat16", max_model_len=64, kv_cache_memory="4MiB", speculative_config=options) as llm:
    assert llm.generate([[1, 2, 3, 1, 2]], use_tqdm=False)
from specdec_ngram.ngram import _KERNELS
assert _KERNELS._loaded
print(*{"numba", "llvmlite"} & set(sys.modules))
"""


def test_a_process_that_decodes_has_no_compiler_in_it(tmp_path: Path) -> None:
    """numba and LLVM would take over 100 MB."""
    from specdec.testing import tiny_model

    command = [sys.executable, "-c", DECODE, str(tiny_model("llama", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
