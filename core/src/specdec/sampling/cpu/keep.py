"""`rejection` of chains on CPUs: rows are weighed until a draft token is rejected, then the last tokens drawn."""

from __future__ import annotations

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.simd import word
from specdec.cpu.threads import add_atomically, barrier, thread_count
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.sampling.cpu.memory import int64s, next_item
from specdec.sampling.cpu.steps import (
    ACCEPTED,
    REJECTED,
    finish_range,
    may_be_reached,
    num_accepted,
    position_of,
    request_span,
    token_stays,
    weigh_range,
)


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
        row = first + number
        if number < count and may_be_reached(block, first, number) and weigh_range(block, request, row, item, bounds):
            accepted = token_stays(block, request, row, position_of(block, row), 0)
            int64s(word(block, Job.STATES), row + 1)[row] = ACCEPTED if accepted else REJECTED
        item = next_item(block)
    barrier(team, thread_count(team))
    item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
    while item < requests * parts:
        first, count = request_span(block, item // parts)
        finish_range(block, item, num_accepted(block, first, count), 1.0, words, bounds)
        item = add_atomically(block + 8 * Job.LAST_TICKET.value, 1)
