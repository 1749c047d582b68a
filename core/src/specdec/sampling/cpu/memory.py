"""Arrays over raw memory, and the items of the sampling regions.

Regions (`specdec.cpu.team`) run on torch's threads and get one address. Their work is cut into items, which the threads
take one after another: a row, or a range of a row's vocabulary when there are few rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from specdec.cpu.simd import inlined, kernel, word
from specdec.cpu.threads import add_atomically
from specdec.sampling.cpu.job import BLOCK, Job


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@inlined
def float32s(address: Any, count: Any) -> Any:
    """The ``count`` float32 at an address."""
    return carray(_pointer(address), count, np.float32)


@inlined
def uint16s(address: Any, count: Any) -> Any:
    """The ``count`` uint16 at an address."""
    return carray(_pointer(address), count, np.uint16)


@inlined
def float64s(address: Any, count: Any) -> Any:
    """The ``count`` float64 at an address."""
    return carray(_pointer(address), count, np.float64)


@inlined
def int64s(address: Any, count: Any) -> Any:
    """The ``count`` int64 at an address."""
    return carray(_pointer(address), count, np.int64)


@inlined
def int32s(address: Any, count: Any) -> Any:
    """The ``count`` int32 at an address."""
    return carray(_pointer(address), count, np.int32)


@kernel
def next_item(block: Any) -> Any:
    """Take the next item; -1 when none is left."""
    item = add_atomically(block + 8 * Job.TICKET.value, 1)
    return item if item < word(block, Job.COUNT) * word(block, Job.PARTS) else -1


@kernel
def range_of(block: Any, item: Any) -> Any:
    """The entry of an item, and where its range of the vocabulary starts (a multiple of `BLOCK`) and ends."""
    parts, vocab = word(block, Job.PARTS), word(block, Job.VOCAB)
    part = item % parts
    blocks = (vocab + BLOCK - 1) // BLOCK
    return item // parts, blocks * part // parts * BLOCK, min(vocab, blocks * (part + 1) // parts * BLOCK)


@kernel
def row_address(block: Any, entry: Any, first: Any) -> Any:
    """Where an entry's logits from token ``first`` on lie."""
    rows = word(block, Job.ROWS)
    row = entry
    if rows != 0:
        row = int64s(rows, word(block, Job.COUNT))[entry]
    size = 2 if word(block, Job.BFLOAT16) != 0 else 4
    return word(block, Job.LOGITS) + (row * word(block, Job.VOCAB) + first) * size
