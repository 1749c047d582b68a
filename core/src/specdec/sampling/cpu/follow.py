"""`match` on CPUs: the target is sampled along the path that each request's samples take through its draft."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.simd import kernel, word
from specdec.cpu.threads import add_atomically, thread_count
from specdec.sampling.codes import PLACEHOLDER_TOKEN_ID, Purpose
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.sampling.cpu.memory import float64s, int32s, int64s, next_item, range_of
from specdec.sampling.cpu.steps import (
    FIRST_STATE,
    LEFT_OUT,
    OPEN,
    draft_token,
    draw,
    end_run,
    is_last_range,
    request_span,
    run_of,
    winner,
)

_SAMPLE = np.uint32(Purpose.SAMPLE)
_SAMPLED = FIRST_STATE
"""Added to a row's sample, which is at least -3, it is the row's state."""


@kernel
def _parent_of(block: int, request: int, first: int, number: int) -> Any:
    """The number of the row, among its request's, that decides on the draft token before row ``number`` > 0."""
    parents = word(block, Job.PARENTS)
    if parents == 0:
        return number - 1
    node = first - request + number - 1
    return np.int64(int32s(parents, node + 1)[node]) + 1


@kernel
def _may_be_reached(block: int, request: int, first: int, number: int) -> bool:
    """Whether a row can lie on its request's path, as far as is known; notes when it cannot."""
    if number == 0:
        return True
    node = first - request + number - 1
    states = int64s(word(block, Job.STATES), first + number + 1)
    before = states[first + _parent_of(block, request, first, number)]
    if before == OPEN or before == draft_token(block, node) + _SAMPLED:
        return True
    states[first + number] = LEFT_OUT
    return False


@kernel
def _sample_range(block: int, request: int, row: int, item: int, words: Any, bounds: Any) -> None:
    parts = word(block, Job.PARTS)
    _, start, end = range_of(block, item)
    place = row * parts + item % parts
    scores = float64s(word(block, Job.SCORES), (row + 1) * parts)
    tokens = int64s(word(block, Job.TOKENS), (row + 1) * parts)
    scores[place], tokens[place] = draw(block, row, request, start, end, _SAMPLE, words, bounds)
    if is_last_range(block, row):
        int64s(word(block, Job.STATES), row + 1)[row] = winner(scores, tokens, row * parts, parts) + _SAMPLED


@kernel
def _child(block: int, request: int, first: int, count: int, number: int, token: int) -> int:
    """The first row behind row ``number`` of a request whose draft token is ``token``; -1 when there is none."""
    if token < 0:
        return -1
    for later in range(number + 1, count + 1):
        if (
            draft_token(block, first - request + later - 1) == token
            and _parent_of(block, request, first, later) == number
        ):
            return later
    return -1


@kernel
def _follow(block: int, request: int) -> None:
    """Write the run of a request, all of whose path has been sampled."""
    first, count = request_span(block, request)
    width, path = word(block, Job.WIDTH), word(block, Job.PATH)
    states = int64s(word(block, Job.STATES), first + count + 1)
    out = run_of(block, request)
    nodes = int32s(path + 4 * (width - 1) * request, (width - 1) * (path != 0))
    for i in range(nodes.shape[0]):
        nodes[i] = PLACEHOLDER_TOKEN_ID
    number, depth = 0, 0
    while True:
        token = states[first + number] - _SAMPLED
        number = _child(block, request, first, count, number, token)
        if number < 0 or depth == width - 1:
            end_run(block, request, depth, token)
            return
        out[depth] = token
        if path != 0:
            nodes[depth] = number - 1
        depth += 1


@region
def match_region(block: int) -> None:
    """The runs of a step's requests by the rule of `match`, with its argument block `Job`."""
    requests, parts = word(block, Job.REQUESTS), word(block, Job.PARTS)
    words = np.empty(BLOCK, dtype=np.uint32)
    bounds = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        number, request = item // parts // requests, item // parts % requests
        first, count = request_span(block, request)
        if number <= count and _may_be_reached(block, request, first, number):
            _sample_range(block, request, first + number, item, words, bounds)
        item = next_item(block)
    if add_atomically(block + 8 * Job.FINISHED.value, 1) == thread_count(word(block, Job.TEAM)) - 1:
        for request in range(requests):
            _follow(block, request)
