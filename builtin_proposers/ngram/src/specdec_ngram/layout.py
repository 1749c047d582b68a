"""What the proposer and its compiled part agree on: a request's row of state, and the fields of a node."""

from __future__ import annotations

TABLE, NODES, CAPACITY, USED, INDEXED, LAST_TOKEN, NUM_COLUMNS = range(7)
"""Columns of a request's row of state (int64): addresses of its table and nodes, room for nodes, nodes in use, how many
leading positions are dealt with, and the token at the last of them."""

POSITION, DEPTH, PARENT, CHILD, NODE_WIDTH = range(5)
"""Fields of a node (int32)."""


def num_slots(capacity: int) -> int:
    """Slots of the table of an index with room for ``capacity`` nodes: at most two thirds are taken."""
    return capacity + capacity // 2
