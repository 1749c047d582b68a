"""Arrays over raw memory, and the argument block of the sampling regions.

Regions (`specdec.cpu.team`) run on torch's threads and get one address. Their work is cut into items, which the threads
take one after another: a row, or a range of a row's vocabulary when there are few rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from specdec.cpu.simd import word
from specdec.cpu.team import add_atomically
from specdec.sampling.cpu.bits import BLOCK


class Job(IntEnum):
    """Words of the argument block of the sampling regions; addresses are 0 where a region does without."""

    TEAM = 0
    TICKET = 1
    """The next item; 0 at the start."""
    COUNT = 2
    """Entries E: rows to work on."""
    PARTS = 3
    """Ranges that the vocabulary of each entry is cut into."""
    VOCAB = 4
    BFLOAT16 = 5
    """1 if the logits are bfloat16, 0 if float32."""
    LOGITS = 6
    """[R, VOCAB], contiguous."""
    ROWS = 7
    """int64 [E], or 0 for rows 0 .. E - 1."""
    TEMPERATURE = 8
    """float32 [E]."""
    SEEDS = 9
    """int64 [E]."""
    POSITIONS = 10
    """int64 [E]."""
    PURPOSE = 11
    SCORES = 12
    """float64 [E, PARTS], out."""
    TOKENS = 13
    """int64 [E, PARTS], out."""
    SUMS = 14
    """float64 [E, PARTS], out."""
    NORMALIZERS = 15
    """float64 [E]."""
    LARGEST = 16
    """float32 [E]: the largest logit."""
    EXCLUDED = 17
    """int64 [E]."""
    PROBS = 18
    """float32 [N, VOCAB], contiguous."""
    PROB_ROWS = 19
    """int64 [E]."""

    # Of the regions over a whole step (`specdec.sampling.cpu.steps`): B requests with R rows and N draft tokens.
    # TEMPERATURE and SEEDS are those of the B requests, POSITIONS, SCORES, TOKENS, SUMS, NORMALIZERS and LARGEST of the
    # R rows.
    REQUESTS = 20
    ROW_START = 21
    """int32 [B + 1]."""
    DRAFT = 22
    """int64 [N]: the draft tokens."""
    PARENTS = 23
    """int32 [N], or 0 for chains."""
    STATES = 24
    """int64 [R]: what is known of each row; 0 at the start."""
    PENDING = 25
    """int64 [R + B]: ranges done of each row, then of each request's last token; 0 at the start."""
    WINNERS = 26
    """int64 [R]: the first largest token, or a code."""
    LAST_TICKET = 27
    """The next item of the last phase; 0 at the start."""
    FINISHED = 28
    """Threads without work left; 0 at the start."""
    WIDTH = 29
    """Columns of OUT."""
    OUT = 30
    """int64 [B, WIDTH]: `specdec.types.Verdict.token_ids`."""
    NUM_TOKENS = 31
    """int32 [B]."""
    PATH = 32
    """int32 [B, WIDTH - 1]: the accepted nodes, or 0 for chains."""
    NEXT_TICKET = 33
    """The next item of a phase in between; 0 at the start."""


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@njit(inline="always")
def float32s(address: Any, count: Any) -> Any:
    """The ``count`` float32 at an address."""
    return carray(_pointer(address), count, np.float32)


@njit(inline="always")
def uint16s(address: Any, count: Any) -> Any:
    """The ``count`` uint16 at an address."""
    return carray(_pointer(address), count, np.uint16)


@njit(inline="always")
def float64s(address: Any, count: Any) -> Any:
    """The ``count`` float64 at an address."""
    return carray(_pointer(address), count, np.float64)


@njit(inline="always")
def int64s(address: Any, count: Any) -> Any:
    """The ``count`` int64 at an address."""
    return carray(_pointer(address), count, np.int64)


@njit(inline="always")
def int32s(address: Any, count: Any) -> Any:
    """The ``count`` int32 at an address."""
    return carray(_pointer(address), count, np.int32)


@njit(inline="always")
def next_item(block: Any) -> Any:
    """Take the next item; -1 when none is left."""
    item = add_atomically(block + 8 * Job.TICKET.value, 1)
    return item if item < word(block, Job.COUNT) * word(block, Job.PARTS) else -1


@njit(inline="always")
def range_of(block: Any, item: Any) -> Any:
    """The entry of an item, and where its range of the vocabulary starts (a multiple of `BLOCK`) and ends."""
    parts, vocab = word(block, Job.PARTS), word(block, Job.VOCAB)
    part = item % parts
    blocks = (vocab + BLOCK - 1) // BLOCK
    return item // parts, blocks * part // parts * BLOCK, min(vocab, blocks * (part + 1) // parts * BLOCK)


@njit(inline="always")
def row_address(block: Any, entry: Any, first: Any) -> Any:
    """Where an entry's logits from token ``first`` on lie."""
    rows = word(block, Job.ROWS)
    row = entry
    if rows != 0:
        row = int64s(rows, word(block, Job.COUNT))[entry]
    size = 2 if word(block, Job.BFLOAT16) != 0 else 4
    return word(block, Job.LOGITS) + (row * word(block, Job.VOCAB) + first) * size
