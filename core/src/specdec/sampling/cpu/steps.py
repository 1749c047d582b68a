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
from specdec.cpu.team import add_atomically
from specdec.sampling.cpu.choose import choose
from specdec.sampling.cpu.memory import Job, float32s, int32s, int64s, row_address, uint16s
from specdec.sampling.outcome import NAN_LOGITS
from specdec.types import PLACEHOLDER_TOKEN_ID

OPEN = 0
"""State of a row of which nothing is known yet."""
LEFT_OUT = 1
"""State of a row that nobody will ask for."""
FIRST_STATE = 8
"""States from here on are the region's own."""


@kernel
def request_span(block: int, request: int) -> tuple[int, int]:
    """The first row of a request, and how many draft tokens it has."""
    starts = int32s(word(block, Job.ROW_START), word(block, Job.REQUESTS) + 1)
    first = np.int64(starts[request])
    return first, np.int64(starts[request + 1]) - first - 1


@kernel
def parent_of(block: int, request: int, first: int, number: int) -> int:
    """The number of the row, among its request's, that decides on the draft token before row ``number`` > 0."""
    parents = word(block, Job.PARENTS)
    if parents == 0:
        return number - 1
    node = first - request + number - 1
    return np.int64(int32s(parents, node + 1)[node]) + 1


@kernel
def is_last_range(block: int, counter: int) -> bool:
    """Count a range as done; whether it was the last one of what has this counter of PENDING."""
    return bool(add_atomically(word(block, Job.PENDING) + 8 * counter, 1) == word(block, Job.PARTS) - 1)


@kernel
def winner(scores: Any, tokens: Any, first: int, parts: int) -> int:
    """The token with the highest score of some ranges, the first on ties, or a code."""
    best, token = scores[first], tokens[first]
    for i in range(first, first + parts):
        if tokens[i] == NAN_LOGITS:
            return np.int64(NAN_LOGITS)
        if scores[i] > best:
            best, token = scores[i], tokens[i]
    return np.int64(token)


@kernel
def draw(block: int, row: int, request: int, first: int, end: int, purpose: Any, words: Any, bounds: Any) -> Any:
    """The score and the token of a range of a row, at its request's temperature."""
    count = word(block, Job.REQUESTS)
    temperature = float32s(word(block, Job.TEMPERATURE), count)[request]
    seed = int64s(word(block, Job.SEEDS), count)[request]
    position = int64s(word(block, Job.POSITIONS), row + 1)[row]
    address = row_address(block, row, first)
    if word(block, Job.BFLOAT16) != 0:
        halves = uint16s(address, end - first)
        return choose(halves, first, temperature, seed, position, purpose, words, bounds)
    floats = float32s(address, end - first)
    return choose(floats, first, temperature, seed, position, purpose, words, bounds)


@kernel
def write_run(block: int, request: int, num_accepted: int, last: int) -> None:
    """Write a request's run: its first draft tokens, already in place, then the last token."""
    count, width = word(block, Job.REQUESTS), word(block, Job.WIDTH)
    out = int64s(word(block, Job.OUT) + 8 * width * request, width)
    out[num_accepted] = last
    for i in range(num_accepted + 1, width):
        out[i] = PLACEHOLDER_TOKEN_ID
    int32s(word(block, Job.NUM_TOKENS), count)[request] = num_accepted + 1
