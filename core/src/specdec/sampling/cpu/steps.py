"""What the regions over a whole step share: rows are worked on only as far as each request's draft is kept.

Items are taken in order of depth: the first rows of all requests, then the second rows, and so on. Whoever takes an
item looks whether the row before has decided against the draft token between the two; then nobody will ask for this
row, and it is left out. As long as that is not known, because another thread is at it, the row is worked on, perhaps in
vain. So no thread waits, and what comes out does not depend on who was faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.simd import kernel, word
from specdec.cpu.threads import add_atomically
from specdec.sampling.codes import NAN_LOGITS, PLACEHOLDER_TOKEN_ID, Purpose
from specdec.sampling.cpu.accept import stays
from specdec.sampling.cpu.bits import as_float
from specdec.sampling.cpu.choose import choose
from specdec.sampling.cpu.job import Job
from specdec.sampling.cpu.memory import float32s, float64s, int32s, int64s, range_of, row_address, uint16s
from specdec.sampling.cpu.weigh import NO_WEIGHT, log_normalizer, normalize, residual_race

OPEN = 0
"""State of a row of which nothing is known yet."""
LEFT_OUT = 1
"""State of a row that nobody will ask for."""
REJECTED, ACCEPTED = 2, 3
"""States of a row that has decided on the draft token behind it."""
FIRST_STATE = 8
"""States from here on are a region's own."""

_SAMPLE, _ACCEPT, _RECOVER = np.uint32(Purpose.SAMPLE), np.uint32(Purpose.ACCEPT), np.uint32(Purpose.RECOVER)


# --- requests, rows and ranges --------------------------------------------------------------------


@kernel
def request_span(block: int, request: int) -> Any:
    """The first row of a request, and how many draft tokens it has."""
    starts = int32s(word(block, Job.ROW_START), word(block, Job.REQUESTS) + 1)
    first = np.int64(starts[request])
    return first, np.int64(starts[request + 1]) - first - 1


@kernel
def draft_token(block: int, node: int) -> int:
    """A draft token by its index among the N."""
    return int64s(word(block, Job.DRAFT), node + 1)[node]


@kernel
def temperature_of(block: int, request: int) -> Any:
    """A request's temperature, float32."""
    return float32s(word(block, Job.TEMPERATURE), request + 1)[request]


@kernel
def seed_of(block: int, request: int) -> int:
    """A request's seed."""
    return int64s(word(block, Job.SEEDS), request + 1)[request]


@kernel
def position_of(block: int, row: int) -> int:
    """The position that a row's noise is keyed by."""
    return int64s(word(block, Job.POSITIONS), row + 1)[row]


@kernel
def logit_of(block: int, row: int, token: int) -> Any:
    """A token's logit, float32."""
    address = row_address(block, row, token)
    return as_float(uint16s(address, 1)[0]) if word(block, Job.BFLOAT16) != 0 else float32s(address, 1)[0]


@kernel
def drafted_of(block: int, node: int, token: int) -> float:
    """The probability that a draft token's law gives it; 1 without laws, 0 for what is no token."""
    probs, vocab = word(block, Job.PROBS), word(block, Job.VOCAB)
    if token < 0 or token >= vocab:
        return 0.0
    return np.float64(float32s(probs + 4 * (node * vocab + token), 1)[0]) if probs != 0 else 1.0


@kernel
def is_last_range(block: int, counter: int) -> bool:
    """Count a range as done; whether it was the last one of what has this counter of PENDING, which starts anew."""
    address = word(block, Job.PENDING) + 8 * counter
    if add_atomically(address, 1) < word(block, Job.PARTS) - 1:
        return False
    int64s(address, 1)[0] = 0
    return True


@kernel
def winner(scores: Any, tokens: Any, first: int, parts: int) -> Any:
    """The token with the highest score of some ranges, the first on ties, or a code."""
    best, token = scores[first], tokens[first]
    for i in range(first, first + parts):
        if tokens[i] == NAN_LOGITS:
            return np.int64(NAN_LOGITS)
        if scores[i] > best:
            best, token = scores[i], tokens[i]
    return np.int64(token)


# --- what rejection asks of the rows that decide ---------------------------------------------------


@kernel
def may_be_reached(block: int, first: int, number: int) -> bool:
    """Whether everything before a chain's row may be kept, as far as is known; notes when it is not."""
    states = int64s(word(block, Job.STATES), first + number + 1)
    before = states[first + number - 1] if number > 0 else ACCEPTED
    possible = bool((before == OPEN) | (before == ACCEPTED))
    if not possible:
        states[first + number] = LEFT_OUT
    return possible


@kernel
def weigh_range(block: int, request: int, row: int, item: int, masses: Any) -> bool:
    """Weigh a range of a row; whether it was the last one, and the row now has its WINNERS and NORMALIZERS."""
    parts = word(block, Job.PARTS)
    temperature = temperature_of(block, request)
    _, start, end = range_of(block, item)
    place = row * parts + item % parts
    address = row_address(block, row, start)
    if word(block, Job.BFLOAT16) != 0:
        largest, token, total = normalize(uint16s(address, end - start), temperature, masses)
    else:
        largest, token, total = normalize(float32s(address, end - start), temperature, masses)
    scores = float64s(word(block, Job.SCORES), (row + 1) * parts)
    sums = float64s(word(block, Job.SUMS), (row + 1) * parts)
    tokens = int64s(word(block, Job.TOKENS), (row + 1) * parts)
    scores[place], sums[place], tokens[place] = largest, total, token if token < 0 else start + token
    if not is_last_range(block, row):
        return False
    token = winner(scores, tokens, row * parts, parts)
    normalizer = log_normalizer(scores, sums, row * parts, parts, temperature) if token >= 0 else np.nan
    int64s(word(block, Job.WINNERS), row + 1)[row] = token
    float64s(word(block, Job.NORMALIZERS), row + 1)[row] = normalizer
    return True


@kernel
def winner_of(block: int, row: int) -> int:
    """The first largest token of a weighed row, or a code."""
    return int64s(word(block, Job.WINNERS), row + 1)[row]


@kernel
def normalizer_of(block: int, row: int) -> float:
    """The normalizer of a weighed row; NaN where it gives no token."""
    return float64s(word(block, Job.NORMALIZERS), row + 1)[row]


@kernel
def token_stays(block: int, request: int, row: int, position: int, index: int) -> bool:
    """Whether the draft token behind a weighed row stays, by itself.

    ``position`` and ``index`` key the uniform: the ``index``-th of those of `specdec.sampling.noise.uniforms`.
    """
    token, largest = draft_token(block, row - request), winner_of(block, row)
    if largest < 0 or token < 0 or token >= word(block, Job.VOCAB):
        return False
    drafted = drafted_of(block, row - request, token)
    logit, normalizer, temperature = (
        logit_of(block, row, token),
        normalizer_of(block, row),
        temperature_of(block, request),
    )
    seed = seed_of(block, request)
    return bool(stays(token, logit, largest, normalizer, temperature, seed, position, index, _ACCEPT, drafted))


@kernel
def num_accepted(block: int, first: int, count: int) -> int:
    """How many draft tokens of a chain come before the first that was not accepted."""
    states = int64s(word(block, Job.STATES), first + count)
    kept = 0
    while kept < count and states[first + kept] == ACCEPTED:
        kept += 1
    return kept


# --- last tokens ----------------------------------------------------------------------------------


@kernel
def draw(block: int, row: int, request: int, first: int, end: int, purpose: Any, words: Any, bounds: Any) -> Any:
    """The score and the token of a range of a row, at its request's temperature."""
    temperature, seed, position = temperature_of(block, request), seed_of(block, request), position_of(block, row)
    address = row_address(block, row, first)
    if word(block, Job.BFLOAT16) != 0:
        halves = uint16s(address, end - first)
        return choose(halves, first, temperature, seed, position, purpose, words, bounds)
    floats = float32s(address, end - first)
    return choose(floats, first, temperature, seed, position, purpose, words, bounds)


@kernel
def _recover(
    block: int, request: int, row: int, share: float, first: int, end: int, words: Any, bounds: Any
) -> Any:  # fmt: skip
    """The best score of a range of what a row's rejected draft token leaves, and its token."""
    token, temperature = winner_of(block, row), temperature_of(block, request)
    if token < 0 or temperature == 0:
        return 0.0, token
    vocab, node = word(block, Job.VOCAB), row - request
    probs, excluded = float32s(word(block, Job.PROBS), 0), draft_token(block, node)
    if word(block, Job.PROBS) != 0:
        probs, excluded = float32s(word(block, Job.PROBS) + 4 * (node * vocab + first), end - first), -1
    normalizer, largest = normalizer_of(block, row), logit_of(block, row, token)
    seed, position = seed_of(block, request), position_of(block, row)
    address = row_address(block, row, first)
    if word(block, Job.BFLOAT16) != 0:
        return residual_race(
            uint16s(address, end - first), probs, share, first, excluded, temperature, largest, normalizer, seed,
            position, _RECOVER, words, bounds,
        )  # fmt: skip
    return residual_race(
        float32s(address, end - first), probs, share, first, excluded, temperature, largest, normalizer, seed, position,
        _RECOVER, words, bounds,
    )  # fmt: skip


@kernel
def finish_range(block: int, item: int, kept: int, share: float, words: Any, bounds: Any) -> None:
    """Draw a range of the token after a chain's kept draft tokens; write the run when that was the last range.

    After a rejection the token comes from what the target's law has over ``share`` times the draft's.
    """
    requests, parts = word(block, Job.REQUESTS), word(block, Job.PARTS)
    request, start, end = range_of(block, item)
    first, count = request_span(block, request)
    row = first + kept
    place = row * parts + item % parts
    scores = float64s(word(block, Job.SCORES), (row + 1) * parts)
    tokens = int64s(word(block, Job.TOKENS), (row + 1) * parts)
    if kept == count:
        scores[place], tokens[place] = draw(block, row, request, start, end, _SAMPLE, words, bounds)
    else:
        scores[place], tokens[place] = _recover(block, request, row, share, start, end, words, bounds)
    num_rows = int32s(word(block, Job.ROW_START), requests + 1)[requests]
    if not is_last_range(block, num_rows + request):
        return
    token = winner(scores, tokens, row * parts, parts)
    if token == NO_WEIGHT:
        # Only rounding leads here: the two laws are equal, and so is what they give.
        # np.int64, because numba compiles another `draw` for a literal.
        _, token = draw(block, row, request, np.int64(0), word(block, Job.VOCAB), _RECOVER, words, bounds)
    out = run_of(block, request)
    for i in range(kept):
        out[i] = draft_token(block, first - request + i)
    end_run(block, request, kept, token)


@kernel
def run_of(block: int, request: int) -> Any:
    """Where a request's tokens go, int64 [WIDTH]."""
    width = word(block, Job.WIDTH)
    return int64s(word(block, Job.OUT) + 8 * width * request, width)


@kernel
def end_run(block: int, request: int, num_accepted: int, last: int) -> None:
    """End a request's run, whose accepted draft tokens are in place already."""
    out = run_of(block, request)
    out[num_accepted] = last
    for i in range(num_accepted + 1, out.shape[0]):
        out[i] = PLACEHOLDER_TOKEN_ID
    int32s(word(block, Job.NUM_TOKENS), word(block, Job.REQUESTS))[request] = num_accepted + 1
