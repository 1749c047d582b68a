"""Block verification compiled for CPUs: one call, in which all threads take part.

Three phases. Rows that decide on draft tokens are weighed, as far as the path's weight is above 0. Then each request
looks for its longest length that passes, from the whole draft down: h_i is at most w_i, and 1 where w_i is, so the sum
over the vocabulary is needed only where the length's uniform is below a w_i that is below 1. Last come the tokens after
the kept ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.simd import kernel, word
from specdec.cpu.threads import add_atomically, barrier, thread_count
from specdec.sampling.codes import Purpose
from specdec.sampling.cpu.accept import uniform_at
from specdec.sampling.cpu.bits import as_float, float_bits, float_from_bits
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.sampling.cpu.memory import float32s, float64s, int64s, next_item, range_of, row_address, uint16s
from specdec.sampling.cpu.steps import (
    ACCEPTED,
    FIRST_STATE,
    REJECTED,
    draft_token,
    drafted_of,
    finish_range,
    is_last_range,
    logit_of,
    may_be_reached,
    normalizer_of,
    num_accepted,
    position_of,
    request_span,
    seed_of,
    temperature_of,
    token_stays,
    weigh_range,
    winner_of,
)

_ACCEPT = np.uint32(Purpose.ACCEPT)
_UNKNOWN, _FAILS, _PASSES = 0, 1, 2
"""What is known of a length."""
DECIDED = FIRST_STATE
"""Added to that, it is the state of the row behind the length, once the row is weighed."""

_LOG2_E = 1.0 / math.log(2.0)
_LOWEST = np.float32(-120.0)
"""Probabilities below 2**-120 count as that, which is nothing beside a float32 one."""
_ROUND = np.float32(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 to an integer, which its low bits then hold."""
_SERIES = tuple(np.float32(math.log(2.0) ** n / math.factorial(n)) for n in range(7))


@kernel(fastmath={"contract"}, forceinline=True)
def _power_of_two(x: Any) -> Any:
    """2**x for -126 <= x <= 126 to about 2e-7: the Taylor series about the nearest integer, and the integer itself."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    p = _SERIES[6]
    p = p * r + _SERIES[5]
    p = p * r + _SERIES[4]
    p = p * r + _SERIES[3]
    p = p * r + _SERIES[2]
    p = p * r + _SERIES[1]
    p = p * r + _SERIES[0]
    return p * float_from_bits(np.int32((float_bits(shifted) + np.int32(127)) << np.int32(23)))


@kernel(fastmath={"contract"})
def _surplus(row: Any, per_bit: Any, largest: Any, weight: Any, drafted: Any, sums: Any) -> Any:
    """The sum of ``max(weight * 2**((logit - largest) * per_bit) - drafted, 0)``; terms in float32."""
    for i in range(BLOCK):
        sums[i] = 0.0
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        other = drafted[start : start + BLOCK]
        for i in range(block.shape[0]):
            mass = _power_of_two(max((as_float(block[i]) - largest) * per_bit, _LOWEST))
            sums[i] += max(weight * mass - other[i], np.float32(0.0))
    total = 0.0
    for i in range(BLOCK):
        total += np.float64(sums[i])
    return total


@kernel
def _ratio(block: int, request: int, row: int) -> float:
    """P(X) / Q(X) of the draft token behind a weighed row; 0 where Q(X) is, NaN where the row gives no token."""
    token, temperature = draft_token(block, row - request), np.float64(temperature_of(block, request))
    drafted = drafted_of(block, row - request, token)
    if not drafted > 0:
        return 0.0
    return math.exp(np.float64(logit_of(block, row, token)) / temperature - normalizer_of(block, row)) / drafted


@kernel
def _longer(weight: float, ratio: float) -> float:
    """w_i from w_{i-1} and P(X_i) / Q(X_i); 0 or NaN where nothing from here on can pass."""
    weight = weight * ratio
    return 1.0 if weight > 1 else weight


@kernel
def _weight(block: int, request: int, first: int, length: int) -> float:
    """w_i."""
    weight = 1.0
    for row in range(first, first + length):
        weight = _longer(weight, _ratio(block, request, row))
        if not weight > 0:
            break
    return weight


@kernel
def _is_joint(block: int, request: int, first: int, count: int) -> bool:
    """Whether chance takes part in a request's draft and in its sampling; the others are decided token by token."""
    if temperature_of(block, request) == 0:
        return False
    for node in range(first - request, first - request + count):
        if not drafted_of(block, node, draft_token(block, node)) >= 1:
            return True
    return False


@kernel
def _weigh(block: int, item: int, masses: Any) -> None:
    """First phase: weigh a range of a row, and decide whether the rows behind are needed."""
    requests, parts = word(block, Job.REQUESTS), word(block, Job.PARTS)
    number, request = item // parts // requests, item // parts % requests
    first, count = request_span(block, request)
    row = first + number
    if number >= count or not may_be_reached(block, first, number):
        return
    if weigh_range(block, request, row, item, masses):
        if _is_joint(block, request, first, count):
            needed = _ratio(block, request, row) > 0
        else:
            needed = token_stays(block, request, row, position_of(block, first), number)
        int64s(word(block, Job.STATES), row + 1)[row] = ACCEPTED if needed else REJECTED


@kernel
def _chance(block: int, request: int, first: int, length: int) -> float:
    """The uniform of a length 1 … k, keyed by the step."""
    return uniform_at(seed_of(block, request), position_of(block, first), length - 1, _ACCEPT)


@kernel
def _known(block: int, request: int, first: int, count: int, length: int, weight: float) -> int:
    """What is known of a length: whether it passes, unless that takes a sum over the vocabulary not made yet."""
    if not _chance(block, request, first, length) <= weight:
        return _FAILS
    row = first + length
    if length == count or weight >= 1 or winner_of(block, row) < 0:
        # A row that gives no token is reached if everything before it passes, and ends the run with its code.
        return _PASSES
    return max(int64s(word(block, Job.STATES), row + 1)[row] - DECIDED, _UNKNOWN)


@kernel
def _longest(block: int, request: int, first: int, count: int) -> int:
    """The longest length that is known to pass; 0 when none is."""
    longest, weight = 0, 1.0
    for length in range(1, count + 1):
        weight = _longer(weight, _ratio(block, request, first + length - 1))
        if not weight > 0:
            break
        if _known(block, request, first, count, length, weight) == _PASSES:
            longest = length
    return longest


@kernel
def _add_up(block: int, item: int, sums: Any) -> None:
    """Second phase: a range of the sum that a length may need, the longest lengths first."""
    requests, parts = word(block, Job.REQUESTS), word(block, Job.PARTS)
    request = item // parts % requests
    first, count = request_span(block, request)
    length = count - 1 - item // parts // requests
    if length < 1 or not _is_joint(block, request, first, count):
        return
    row, weight = first + length, _weight(block, request, first, length)
    if not weight > 0 or _known(block, request, first, count, length, weight) != _UNKNOWN:
        return
    if _longest(block, request, first, count) > length:
        return
    part_sums = float64s(word(block, Job.SUMS), (row + 1) * parts)
    part_sums[row * parts + item % parts] = _part_of_surplus(block, request, row, weight, item, sums)
    if is_last_range(block, row):
        surplus = 0.0
        for i in range(row * parts, (row + 1) * parts):
            surplus += part_sums[i]
        passes = _chance(block, request, first, length) <= surplus / (surplus + 1 - weight)
        int64s(word(block, Job.STATES), row + 1)[row] = DECIDED + (_PASSES if passes else _FAILS)


@kernel
def _part_of_surplus(block: int, request: int, row: int, weight: float, item: int, sums: Any) -> float:
    _, start, end = range_of(block, item)
    temperature = np.float64(temperature_of(block, request))
    largest = logit_of(block, row, winner_of(block, row))
    # The largest token's probability, so that the distances from it keep their precision.
    share = weight * math.exp(np.float64(largest) / temperature - normalizer_of(block, row))
    per_bit = np.float32(_LOG2_E / temperature)
    drafted = float32s(word(block, Job.PROBS) + 4 * ((row - request) * word(block, Job.VOCAB) + start), end - start)
    address = row_address(block, row, start)
    if word(block, Job.BFLOAT16) != 0:
        return _surplus(uint16s(address, end - start), per_bit, largest, np.float32(share), drafted, sums)
    return _surplus(float32s(address, end - start), per_bit, largest, np.float32(share), drafted, sums)


@kernel
def _finish(block: int, item: int, words: Any, bounds: Any) -> None:
    """Last phase: a range of the token after the kept ones."""
    request = item // word(block, Job.PARTS)
    first, count = request_span(block, request)
    if not _is_joint(block, request, first, count):
        finish_range(block, item, num_accepted(block, first, count), 1.0, words, bounds)
        return
    kept = _longest(block, request, first, count)
    # max(w P - Q, 0) and max(P - Q / w, 0) are the same weights.
    finish_range(block, item, kept, 1 / _weight(block, request, first, kept), words, bounds)


@region
def block_region(block: int) -> None:
    """The runs of a step's requests, whose draft tokens come with laws; its argument block is `Job`."""
    requests, parts, team = word(block, Job.REQUESTS), word(block, Job.PARTS), word(block, Job.TEAM)
    words = np.empty(BLOCK, dtype=np.uint32)
    bounds = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        _weigh(block, item, bounds)
        item = next_item(block)
    barrier(team, thread_count(team))
    item = add_atomically(block + 8 * Job.NEXT_TICKET.value, 1)
    while item < word(block, Job.COUNT) * parts:
        _add_up(block, item, bounds)
        item = add_atomically(block + 8 * Job.NEXT_TICKET.value, 1)
    barrier(team, thread_count(team))
    item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
    while item < requests * parts:
        _finish(block, item, words, bounds)
        item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
