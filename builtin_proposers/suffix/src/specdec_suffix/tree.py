"""The compiled part that both indices share: a suffix trie in flat arrays.

A trie holds the suffixes of texts, each cut to its first ``depth`` tokens, with how often they occur. Paths without a
branch are one edge. A node stands for the pattern from the root down to it::

    text  … a b c x … a b d x …       root ─ "a b" ─┬─ "c x …"
                                                    └─ "d x …"

- COUNT: occurrences of the pattern up to the first token of the edge to the node.
- TOTAL: the sum of its children's COUNT.
- POS: where a late occurrence of the whole pattern starts in the text; edges are read from there.
- BEST: the child with the largest COUNT, the latest of them when several have it.

Edges are found by (parent, first token) in an open-addressing hash table of node numbers; tokens are never copied.
A trie is one row of integers with the addresses of its arrays, so that one compiled call can serve many tries.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from specdec.cpu.compile import compiled
from specdec_suffix.layout import (
    BEST,
    COUNT,
    DEPTH,
    FIRST_CHILD,
    FREE,
    FREED,
    IN_USE,
    NEXT,
    NODE_WIDTH,
    NODES,
    NONE,
    OLDEST,
    PARENT,
    POS,
    PREVIOUS,
    RING,
    SLOTS,
    TABLE,
    TOKEN,
    TOTAL,
    UNKNOWN,
    USED,
)

Pointer: TypeAlias = Any
"""In compiled code: the address of an array, indexed without bounds checks."""
Int: TypeAlias = Any
"""In compiled code: a machine integer."""
Row: TypeAlias = np.ndarray


ROW = types.int64[::1]
"""Signature of a trie's row."""
jit = numba.njit(error_model="numpy")
"""Compiles what other compiled code calls; what Python calls is declared with `specdec.cpu.compile`."""


@intrinsic
def int64_at(typing_context: Any, address: Any) -> Any:
    """Cast an address to a pointer to int64."""
    return types.CPointer(types.int64)(types.int64), _cast


@intrinsic
def int32_at(typing_context: Any, address: Any) -> Any:
    """Cast an address to a pointer to int32."""
    return types.CPointer(types.int32)(types.int64), _cast


def _cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@jit
def _home(parent: int, token: int, mask: int) -> Int:
    """The slot where the search for an edge begins."""
    value = np.uint64(parent + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(value >> np.uint64(32)) & mask


@jit
def find(row: Row, nodes: Pointer, parent: int, token: int) -> Int:
    """Slot of an edge, or the free slot where it would go."""
    table, mask = int32_at(row[TABLE]), row[SLOTS] - 1
    slot = _home(parent, token, mask)
    while table[slot] != 0:
        node = NODE_WIDTH * (table[slot] - 1)
        if nodes[node + PARENT] == parent and nodes[node + TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return slot


@jit
def child_of(row: Row, nodes: Pointer, parent: int, token: int) -> Int:
    """The child whose edge begins with a token, or NONE."""
    return np.int64(int32_at(row[TABLE])[find(row, nodes, parent, token)]) - 1


@jit
def erase(row: Row, nodes: Pointer, slot: int) -> None:
    """Empty a slot and close the gap, so that searches still end at free slots."""
    table, mask = int32_at(row[TABLE]), row[SLOTS] - 1
    at = (slot + 1) & mask
    while table[at] != 0:
        node = NODE_WIDTH * (table[at] - 1)
        home = _home(nodes[node + PARENT], nodes[node + TOKEN], mask)
        if ((at - home) & mask) >= ((at - slot) & mask):
            table[slot] = table[at]
            slot = at
        at = (at + 1) & mask
    table[slot] = 0


@jit
def new_node(row: Row, nodes: Pointer, pos: int, depth: int, parent: int, token: int) -> Int:
    """Take a free node; there must be one. It is not linked yet."""
    node = row[FREE]
    if node != NONE:
        row[FREE] = nodes[NODE_WIDTH * node + NEXT]
    else:
        node = row[USED]
        row[USED] += 1
    row[IN_USE] += 1
    at = NODE_WIDTH * node
    nodes[at + POS] = pos
    nodes[at + DEPTH] = depth
    nodes[at + COUNT] = 0
    nodes[at + TOTAL] = 0
    nodes[at + PARENT] = parent
    nodes[at + TOKEN] = token
    nodes[at + BEST] = NONE
    nodes[at + FIRST_CHILD] = NONE
    nodes[at + NEXT] = NONE
    nodes[at + PREVIOUS] = NONE
    return node


@jit
def free_node(row: Row, nodes: Pointer, node: int) -> None:
    """Give a node back; nothing may refer to it."""
    nodes[NODE_WIDTH * node + PARENT] = FREED
    nodes[NODE_WIDTH * node + NEXT] = row[FREE]
    row[FREE] = node
    row[IN_USE] -= 1


@jit
def add_leaf(row: Row, nodes: Pointer, parent: int, token: int, pos: int, depth: int) -> Int:
    """A new child of a node, seen once."""
    leaf = new_node(row, nodes, pos, depth, parent, token)
    int32_at(row[TABLE])[find(row, nodes, parent, token)] = leaf + 1
    first = nodes[NODE_WIDTH * parent + FIRST_CHILD]
    nodes[NODE_WIDTH * leaf + NEXT] = first
    if first != NONE:
        nodes[NODE_WIDTH * first + PREVIOUS] = leaf
    nodes[NODE_WIDTH * parent + FIRST_CHILD] = leaf
    enter(nodes, parent, leaf)
    return leaf


@jit
def enter(nodes: Pointer, parent: int, child: int) -> None:
    """One more occurrence of a node's pattern goes on into this child, later than all before."""
    nodes[NODE_WIDTH * parent + TOTAL] += 1
    nodes[NODE_WIDTH * child + COUNT] += 1
    best = nodes[NODE_WIDTH * parent + BEST]
    if best == NONE or (best != UNKNOWN and nodes[NODE_WIDTH * child + COUNT] >= nodes[NODE_WIDTH * best + COUNT]):
        nodes[NODE_WIDTH * parent + BEST] = child


@jit
def replace(row: Row, nodes: Pointer, old: int, new: int) -> None:
    """Put a node into another's place below its parent: table, siblings and BEST. PARENT and TOKEN of both stay."""
    parent, token = nodes[NODE_WIDTH * old + PARENT], nodes[NODE_WIDTH * old + TOKEN]
    int32_at(row[TABLE])[find(row, nodes, parent, token)] = new + 1
    before, after = nodes[NODE_WIDTH * old + PREVIOUS], nodes[NODE_WIDTH * old + NEXT]
    nodes[NODE_WIDTH * new + PREVIOUS] = before
    nodes[NODE_WIDTH * new + NEXT] = after
    if before == NONE:
        nodes[NODE_WIDTH * parent + FIRST_CHILD] = new
    else:
        nodes[NODE_WIDTH * before + NEXT] = new
    if after != NONE:
        nodes[NODE_WIDTH * after + PREVIOUS] = new
    if nodes[NODE_WIDTH * parent + BEST] == old:
        nodes[NODE_WIDTH * parent + BEST] = new


@jit
def split(row: Row, nodes: Pointer, tokens: Pointer, node: int, depth: int, pos: int, below: int) -> Int:
    """Put a new node of ``depth`` on the edge to ``node``; ``below`` of its occurrences go on to ``node``.

    Args:
        row: the trie.
        nodes: its nodes.
        tokens: the text that POS counts in.
        node: the lower end of the edge.
        depth: between the depths of the edge's ends.
        pos: POS of the new node.
        below: COUNT of ``node`` from now on.
    """
    parent, token = nodes[NODE_WIDTH * node + PARENT], nodes[NODE_WIDTH * node + TOKEN]
    middle = new_node(row, nodes, pos, depth, parent, token)
    replace(row, nodes, node, middle)
    nodes[NODE_WIDTH * middle + COUNT] = nodes[NODE_WIDTH * node + COUNT]
    nodes[NODE_WIDTH * middle + TOTAL] = below
    nodes[NODE_WIDTH * middle + FIRST_CHILD] = node
    nodes[NODE_WIDTH * middle + BEST] = node
    nodes[NODE_WIDTH * node + COUNT] = below
    nodes[NODE_WIDTH * node + PARENT] = middle
    nodes[NODE_WIDTH * node + TOKEN] = tokens[nodes[NODE_WIDTH * node + POS] + depth]
    nodes[NODE_WIDTH * node + PREVIOUS] = NONE
    nodes[NODE_WIDTH * node + NEXT] = NONE
    int32_at(row[TABLE])[find(row, nodes, middle, nodes[NODE_WIDTH * node + TOKEN])] = node + 1
    return middle


@jit
def best_child(row: Row, nodes: Pointer, node: int) -> Int:
    """The child with the largest COUNT, the latest of them when several have it; NONE without children."""
    best = np.int64(nodes[NODE_WIDTH * node + BEST])
    if best != UNKNOWN:
        return best
    best = np.int64(NONE)
    age = np.int64(NONE)
    child = np.int64(nodes[NODE_WIDTH * node + FIRST_CHILD])
    while child != NONE:
        at = NODE_WIDTH * child
        its_age = (nodes[at + POS] - row[OLDEST]) % row[RING]
        more = best == NONE or nodes[at + COUNT] > nodes[NODE_WIDTH * best + COUNT]
        if more or (nodes[at + COUNT] == nodes[NODE_WIDTH * best + COUNT] and its_age > age):
            best = child
            age = its_age
        child = np.int64(nodes[at + NEXT])
    nodes[NODE_WIDTH * node + BEST] = best
    return best


@compiled(types.void(ROW))
def enter_all(row: Row) -> None:
    """Fill an empty table with the edges of all nodes in use, after it was made larger."""
    table, nodes = int32_at(row[TABLE]), int32_at(row[NODES])
    for node in range(row[USED]):
        parent = nodes[NODE_WIDTH * node + PARENT]
        if parent >= 0:
            table[find(row, nodes, parent, nodes[NODE_WIDTH * node + TOKEN])] = node + 1
