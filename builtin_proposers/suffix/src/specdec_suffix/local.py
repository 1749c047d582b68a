"""The compiled index of one growing text: prompt and output of a running request, token by token.

A suffix of the text that occurred nowhere before is a leaf, which ends where the text ends and grows with it by itself.
The other suffixes, the *active* ones, are the shorter ones: if "b c" is new, so is "a b c". Their places in the trie
(the node at the lower end of the edge they are on) stand in ``loci``, by where they start; a new token moves each by
one. The longest may then have become new, and get leaves; from the first that has not, the rest only move. A suffix
that has reached the trie's depth stays where it is.

That is at most ``depth`` moves a token, and the places of all matches are known when a draft is wanted.
"""

from __future__ import annotations

import numpy as np

from specdec_suffix.layout import (
    CAPACITY,
    COUNT,
    DEPTH,
    FIRST_ACTIVE,
    FREE,
    IN_USE,
    INDEXED,
    LAST_TOKEN,
    LOCI,
    NODE_WIDTH,
    NODES,
    NONE,
    POS,
    SLOTS,
    TABLE,
    USED,
)
from specdec_suffix.tree import (
    Int,
    Pointer,
    Row,
    add_leaf,
    child_of,
    enter,
    int32_at,
    jit,
    new_node,
    split,
)

ROOT = 0


@jit
def clear(row: Row) -> None:
    """Forget the text."""
    table, nodes = int32_at(row[TABLE]), int32_at(row[NODES])
    for slot in range(row[SLOTS]):
        table[slot] = 0
    row[USED] = 0
    row[IN_USE] = 0
    row[FREE] = NONE
    row[INDEXED] = 0
    row[FIRST_ACTIVE] = 0
    new_node(row, nodes, 0, 0, NONE, 0)


@jit
def update(row: Row, tokens: Pointer, length: int, depth: int) -> Int:
    """Take in the tokens up to ``length``; returns whether there was room for all. A changed text is begun again."""
    begin = row[INDEXED]
    if row[USED] == 0 or begin > length or (begin > 0 and tokens[begin - 1] != row[LAST_TOKEN]):
        clear(row)
        begin = row[INDEXED]
    at = begin
    while at < length:
        if row[USED] + 2 * (at - row[FIRST_ACTIVE] + 1) > row[CAPACITY]:
            break
        _append(row, tokens, at, depth)
        at += 1
    row[INDEXED] = at
    row[LAST_TOKEN] = tokens[at - 1] if at > 0 else 0
    return at == length


@jit
def _append(row: Row, tokens: Pointer, at: int, depth: int) -> None:
    """Move all active suffixes by the token at position ``at``, the longest first, and begin a new one."""
    nodes, loci = int32_at(row[NODES]), int32_at(row[LOCI])
    ring = depth + 1
    token = tokens[at]
    start = row[FIRST_ACTIVE]
    if at - start == depth:
        nodes[NODE_WIDTH * loci[start % ring] + POS] = start
        start += 1
    while start <= at:
        length = at - start
        node = np.int64(loci[start % ring]) if length > 0 else np.int64(ROOT)
        if length < nodes[NODE_WIDTH * node + DEPTH]:
            if tokens[nodes[NODE_WIDTH * node + POS] + length] == token:
                break
            node = _split(row, nodes, loci, tokens, node, start, at, ring)
        elif child_of(row, nodes, node, token) != NONE:
            break
        nodes[NODE_WIDTH * node + POS] = start
        add_leaf(row, nodes, node, token, start, depth)
        start += 1
    row[FIRST_ACTIVE] = start
    while start <= at:
        length = at - start
        node = np.int64(loci[start % ring]) if length > 0 else np.int64(ROOT)
        if length == nodes[NODE_WIDTH * node + DEPTH]:
            child = child_of(row, nodes, node, token)
            nodes[NODE_WIDTH * node + POS] = start
            enter(nodes, node, child)
            loci[start % ring] = child
        start += 1


@jit
def _split(row: Row, nodes: Pointer, loci: Pointer, tokens: Pointer, node: int, start: int, at: int, ring: int) -> Int:
    """A node where the suffix from ``start`` leaves the edge to ``node``; shorter suffixes are above it on the edge."""
    above = np.int64(0)
    for other in range(start + 1, at):
        above += loci[other % ring] == node
    below = nodes[NODE_WIDTH * node + COUNT] - 1 - above
    middle = split(row, nodes, tokens, node, at - start, start, below)
    if above > 0:
        for other in range(start + 1, at):
            if loci[other % ring] == node:
                loci[other % ring] = middle
    return middle
