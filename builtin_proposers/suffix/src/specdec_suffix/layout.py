"""What the proposer and its compiled part agree on: the integers of a trie, and the fields of its nodes."""

from __future__ import annotations

(
    TABLE,
    NODES,
    SLOTS,
    CAPACITY,
    USED,
    FREE,
    LOCI,
    INDEXED,
    FIRST_ACTIVE,
    LAST_TOKEN,
    OLDEST,
    RING,
    IN_USE,
    NUM_COLUMNS,
) = range(14)
"""Columns of a trie's row (int64): addresses of its table and nodes, slots of the table (a power of two), room for
nodes, nodes ever used, head of the list of free ones; addresses and counters of a growing text (`local`); where the
oldest stored text starts, and the size of the ring that texts are stored in (`store`); nodes in use now."""

POS, DEPTH, COUNT, TOTAL, PARENT, TOKEN, BEST, FIRST_CHILD, NEXT, PREVIOUS, NODE_WIDTH = range(11)
"""Fields of a node (int32)."""

NONE = -1
UNKNOWN = -2
"""BEST after a removal: to be found again when it is asked for."""
FREED = -3
"""PARENT of a node that is not in use."""

END = -1
"""Stands after every stored text; no token."""

STATE_ROW, ROOT, TOKENS, LENGTH, LIMIT, NUM_ASKED = range(6)
"""Rows of what is asked about the requests of a batch: its row of the state, the root of its scope in the trie of past
responses or NONE, the address of its tokens (int64), how many there are, and the most draft tokens."""

PARENTS, LENGTHS, NUM_TOLD = range(3)
"""Rows of what is told besides the draft tokens: their parents, packed like them, when drafts may branch; the drafts'
lengths."""
