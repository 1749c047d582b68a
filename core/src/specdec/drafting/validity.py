"""Which positions of a request have valid K/V in draft layers that share the target's blocks.

The engine moves and shares blocks for the target; draft layers follow it by two rules.

*Within a request*, positions run through the draft layers are valid as long as their tokens are the text: rejected
draft tokens, and those another proposer had drafted instead, make the positions behind them invalid again.

*Between requests*, a block that is shared as a cached prefix has the target's K/V but perhaps not the draft layers':
the request it came from may have ended before they had run over it. So each block is marked with a hash of the text up
to its end once draft K/V of the whole block is there, and the mark goes as soon as draft K/V is written into the block
again. A request with a cached prefix finds its leading blocks valid whose marks equal the hashes of its own text.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from specdec.attention.interface import KVGeometry
    from specdec.drafting.packing import SlotTable
    from specdec.types import ComputedStep


@define(eq=False)
class DraftState:
    """What the draft layers hold of one request."""

    num_preemptions: int
    num_valid: int = 0
    """Leading positions with valid K/V."""
    drafted: list[int] = field(factory=list)
    """Draft tokens that were run behind the text of the last step, whose positions were all valid."""
    drafted_from: int = 0
    """Position of the first of them."""
    hashes: list[bytes] = field(factory=list)
    """Of the text up to the end of each leading block."""
    num_marked: int = 0
    """Leading blocks whose marks are known to be right."""


class DraftValidity:
    """Follows the requests of an engine; every method is cheap against a forward pass."""

    def __init__(self, geometry: KVGeometry, *, share_prefixes: bool, next_token: bool = False) -> None:
        """Start with no valid K/V.

        Args:
            geometry: of the target's cache.
            share_prefixes: whether the engine caches prefixes; without, no block is marked.
            next_token: whether draft K/V of a position also depends on the token after it (`Needs.next_token`).
        """
        self._block_size = geometry.block_size
        self._marks: list[bytes | None] = [None] * geometry.num_blocks
        self._share = share_prefixes
        self._next = 1 if next_token else 0
        self._states: dict[str, DraftState] = {}

    def update(self, computed: ComputedStep, tables: SlotTable) -> list[DraftState]:
        """Take note of a step: new requests, preemptions, and which draft tokens became text.

        Returns:
            The state of each request of the step, in its order.
        """
        return [self._update(row, computed, tables) for row in range(len(computed.request_ids))]

    def writing(self, row: int, start: int, end: int, tables: SlotTable) -> None:
        """Draft K/V of positions ``start`` to ``end - 1`` of a request is going to be written: their blocks lose their
        marks."""
        if self._share:
            for block in tables.blocks(row, -(-end // self._block_size))[start // self._block_size :].tolist():
                self._marks[block] = None

    def reached(self, state: DraftState, num_valid: int, row: int, text: np.ndarray, tables: SlotTable) -> None:
        """The first ``num_valid`` positions of ``text`` have valid draft K/V now; mark the blocks they fill."""
        state.num_valid = num_valid
        if not self._share:
            return
        num_full = min(num_valid, len(text) - self._next) // self._block_size
        if num_full > state.num_marked:
            self._extend_hashes(state, text, num_full)
            blocks = tables.blocks(row, num_full).tolist()
            for i in range(state.num_marked, num_full):
                self._marks[blocks[i]] = state.hashes[i]
            state.num_marked = num_full

    def forget(self, request_id: str) -> None:
        """A request ended; what is marked stays for others."""
        self._states.pop(request_id, None)

    def _update(self, row: int, computed: ComputedStep, tables: SlotTable) -> DraftState:
        name, preemptions = computed.request_ids[row], int(computed.num_preemptions[row])
        text, num_computed = computed.token_ids[row], int(computed.num_computed[row])
        state = self._states.get(name)
        if state is None or state.num_preemptions != preemptions:
            hashes = [] if state is None else state.hashes
            state = self._states[name] = DraftState(preemptions, hashes=hashes)
            self._adopt(state, row, int(computed.first_position[row]), text, tables)
        elif state.drafted:
            start = state.drafted_from
            state.num_valid = start + _common_prefix(state.drafted, text[start : start + len(state.drafted)].tolist())
            state.drafted = []
        state.num_valid = min(state.num_valid, num_computed)
        return state

    def _adopt(self, state: DraftState, row: int, num_cached: int, text: np.ndarray, tables: SlotTable) -> None:
        """A request with other blocks than before: what of its cached prefix do they hold?"""
        if not self._share:
            return
        num_blocks = num_cached // self._block_size
        self._extend_hashes(state, text, num_blocks)
        blocks = tables.blocks(row, num_blocks).tolist()
        while state.num_marked < num_blocks and self._marks[blocks[state.num_marked]] == state.hashes[state.num_marked]:
            state.num_marked += 1
        state.num_valid = state.num_marked * self._block_size

    def _extend_hashes(self, state: DraftState, text: np.ndarray, num_blocks: int) -> None:
        size = self._block_size
        for i in range(len(state.hashes), num_blocks):
            parent = state.hashes[-1] if state.hashes else b""
            content = text[i * size : (i + 1) * size + self._next].tobytes()
            state.hashes.append(blake2b(parent + content, digest_size=16).digest())


def _common_prefix(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
