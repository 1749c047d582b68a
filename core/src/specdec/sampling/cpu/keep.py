"""`rejection` of chains on CPUs: rows are weighed until a draft token is rejected, then the last tokens drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.simd import kernel, word
from specdec.cpu.team import add_atomically, barrier, thread_count
from specdec.sampling.cpu.accept import stays
from specdec.sampling.cpu.bits import BLOCK, as_float
from specdec.sampling.cpu.memory import (
    Job,
    float32s,
    float64s,
    int32s,
    int64s,
    next_item,
    range_of,
    row_address,
    uint16s,
)
from specdec.sampling.cpu.steps import (
    FIRST_STATE,
    LEFT_OUT,
    OPEN,
    draw,
    is_last_range,
    request_span,
    winner,
    write_run,
)
from specdec.sampling.cpu.weigh import NO_WEIGHT, log_normalizer, normalize, residual_race
from specdec.sampling.noise import Purpose

_SAMPLE, _ACCEPT, _RECOVER = np.uint32(Purpose.SAMPLE), np.uint32(Purpose.ACCEPT), np.uint32(Purpose.RECOVER)
_REJECTED, _ACCEPTED = FIRST_STATE, FIRST_STATE + 1
"""States of rows that have decided on the draft token behind them."""


@kernel
def _logit(block: int, row: int, token: int) -> float:
    address = row_address(block, row, token)
    if word(block, Job.BFLOAT16) != 0:
        return as_float(uint16s(address, 1)[0])
    return float32s(address, 1)[0]


@kernel
def _may_be_reached(block: int, first: int, number: int) -> bool:
    """Whether everything before a row may be kept, as far as is known; notes when it is not."""
    if number == 0:
        return True
    states = int64s(word(block, Job.STATES), first + number + 1)
    before = states[first + number - 1]
    possible = bool((before == OPEN) | (before == _ACCEPTED))
    if not possible:
        states[first + number] = LEFT_OUT
    return possible


@kernel
def _weigh_range(block: int, request: int, row: int, item: int, masses: Any) -> None:
    parts = word(block, Job.PARTS)
    temperature = float32s(word(block, Job.TEMPERATURE), request + 1)[request]
    _, start, end = range_of(block, item)
    place = row * parts + item % parts
    address = row_address(block, row, start)
    if word(block, Job.BFLOAT16) != 0:
        largest, token, total = normalize(uint16s(address, end - start), temperature, masses)
    else:
        largest, token, total = normalize(float32s(address, end - start), temperature, masses)
    float64s(word(block, Job.SCORES), place + 1)[place] = largest
    float64s(word(block, Job.SUMS), place + 1)[place] = total
    int64s(word(block, Job.TOKENS), place + 1)[place] = token if token < 0 else start + token
    if is_last_range(block, row):
        _decide(block, request, row)


@kernel
def _decide(block: int, request: int, row: int) -> None:
    """Join a row's ranges, and decide on the draft token behind it."""
    parts, place = word(block, Job.PARTS), row * word(block, Job.PARTS)
    scores = float64s(word(block, Job.SCORES), place + parts)
    token = winner(scores, int64s(word(block, Job.TOKENS), place + parts), place, parts)
    int64s(word(block, Job.WINNERS), row + 1)[row] = token
    kept = False
    if token >= 0:
        temperature = float32s(word(block, Job.TEMPERATURE), request + 1)[request]
        sums = float64s(word(block, Job.SUMS), place + parts)
        normalizer = log_normalizer(scores, sums, place, parts, temperature)
        float64s(word(block, Job.NORMALIZERS), row + 1)[row] = normalizer
        kept = _stays(block, request, row, token, normalizer, temperature)
    int64s(word(block, Job.STATES), row + 1)[row] = _ACCEPTED if kept else _REJECTED


@kernel
def _stays(block: int, request: int, row: int, largest: int, normalizer: float, temperature: Any) -> bool:
    vocab, node = word(block, Job.VOCAB), row - request
    token = int64s(word(block, Job.DRAFT), node + 1)[node]
    if token < 0 or token >= vocab:
        return False
    drafted = 1.0
    if word(block, Job.PROBS) != 0:
        drafted = np.float64(float32s(word(block, Job.PROBS) + 4 * (node * vocab + token), 1)[0])
    seed = int64s(word(block, Job.SEEDS), request + 1)[request]
    position = int64s(word(block, Job.POSITIONS), row + 1)[row]
    logit = _logit(block, row, token)
    return bool(stays(token, logit, largest, normalizer, temperature, seed, position, _ACCEPT, drafted))


@kernel
def _num_kept(block: int, first: int, count: int) -> int:
    states = int64s(word(block, Job.STATES), first + count)
    kept = 0
    while kept < count and states[first + kept] == _ACCEPTED:
        kept += 1
    return kept


@kernel
def _recover(block: int, request: int, row: int, first: int, end: int, words: Any, bounds: Any) -> Any:
    """The best score of a range of what a row's rejected draft token leaves, and its token."""
    vocab, node = word(block, Job.VOCAB), row - request
    token = int64s(word(block, Job.WINNERS), row + 1)[row]
    temperature = float32s(word(block, Job.TEMPERATURE), request + 1)[request]
    if token < 0 or temperature == 0:
        return 0.0, token
    probs, excluded = float32s(word(block, Job.PROBS), 0), int64s(word(block, Job.DRAFT), node + 1)[node]
    if word(block, Job.PROBS) != 0:
        probs, excluded = float32s(word(block, Job.PROBS) + 4 * (node * vocab + first), end - first), -1
    normalizer = float64s(word(block, Job.NORMALIZERS), row + 1)[row]
    largest = np.float32(_logit(block, row, token))
    seed = int64s(word(block, Job.SEEDS), request + 1)[request]
    position = int64s(word(block, Job.POSITIONS), row + 1)[row]
    address = row_address(block, row, first)
    if word(block, Job.BFLOAT16) != 0:
        return residual_race(
            uint16s(address, end - first), probs, first, excluded, temperature, largest, normalizer, seed, position,
            _RECOVER, words, bounds,
        )  # fmt: skip
    return residual_race(
        float32s(address, end - first), probs, first, excluded, temperature, largest, normalizer, seed, position,
        _RECOVER, words, bounds,
    )  # fmt: skip


@kernel
def _finish_range(block: int, item: int, words: Any, bounds: Any) -> None:
    """Draw a range of a request's last token; write its run when that was the last range."""
    requests, parts = word(block, Job.REQUESTS), word(block, Job.PARTS)
    request, start, end = range_of(block, item)
    first, count = request_span(block, request)
    kept = _num_kept(block, first, count)
    row = first + kept
    place = row * parts + item % parts
    scores = float64s(word(block, Job.SCORES), (row + 1) * parts)
    tokens = int64s(word(block, Job.TOKENS), (row + 1) * parts)
    if kept == count:
        scores[place], tokens[place] = draw(block, row, request, start, end, _SAMPLE, words, bounds)
    else:
        scores[place], tokens[place] = _recover(block, request, row, start, end, words, bounds)
    num_rows = int32s(word(block, Job.ROW_START), requests + 1)[requests]
    if is_last_range(block, num_rows + request):
        token = winner(scores, tokens, row * parts, parts)
        if token == NO_WEIGHT:
            # Only rounding leads here: the two laws are equal, and so is what they give.
            _, token = draw(block, row, request, 0, word(block, Job.VOCAB), _RECOVER, words, bounds)
        _write(block, request, first - request, kept, token)


@kernel
def _write(block: int, request: int, node: int, kept: int, last: int) -> None:
    width = word(block, Job.WIDTH)
    out = int64s(word(block, Job.OUT) + 8 * width * request, width)
    draft = int64s(word(block, Job.DRAFT), node + kept)
    for i in range(kept):
        out[i] = draft[node + i]
    write_run(block, request, kept, last)


@region
def reject_region(block: int) -> None:
    """The runs of a step's requests by the rule of `rejection`, with its argument block `Job`."""
    requests, parts, team = word(block, Job.REQUESTS), word(block, Job.PARTS), word(block, Job.TEAM)
    words = np.empty(BLOCK, dtype=np.uint32)
    bounds = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        number, request = item // parts // requests, item // parts % requests
        first, count = request_span(block, request)
        if number < count and _may_be_reached(block, first, number):
            _weigh_range(block, request, first + number, item, bounds)
        item = next_item(block)
    barrier(team, thread_count(team))
    item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
    while item < requests * parts:
        _finish_range(block, item, words, bounds)
        item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
