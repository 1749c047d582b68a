"""The compiled index of past responses: many whole texts, added at the end and removed from the beginning.

Texts lie in one ring of tokens, each followed by `END`. Every suffix of a text is entered with its first ``depth``
tokens; where it ends there is a node, so COUNT of a node holds for the whole edge above it. Texts leave in the order
in which they came (within one root), which keeps POS right: it names the latest occurrence, and that leaves last.
After a removal the trie is the one that the remaining texts would have made.
"""

from __future__ import annotations

import numpy as np
from numba import types

from specdec.cpu.compile import compiled
from specdec_suffix.layout import (
    BEST,
    COUNT,
    DEPTH,
    FIRST_CHILD,
    NEXT,
    NODE_WIDTH,
    NODES,
    NONE,
    PARENT,
    POS,
    PREVIOUS,
    TOKEN,
    TOTAL,
    UNKNOWN,
)
from specdec_suffix.tree import (
    ROW,
    Int,
    Pointer,
    Row,
    add_leaf,
    child_of,
    enter,
    erase,
    find,
    free_node,
    int32_at,
    int64_at,
    jit,
    new_node,
    replace,
    split,
)


@jit
def _add(row: Row, nodes: Pointer, tokens: Pointer, root: int, start: int, length: int) -> None:
    node = np.int64(root)
    matched = np.int64(0)
    while matched < length:
        token = tokens[start + matched]
        child = child_of(row, nodes, node, token)
        if child == NONE:
            add_leaf(row, nodes, node, token, start, length)
            return
        enter(nodes, node, child)
        there = np.int64(nodes[NODE_WIDTH * child + POS])
        low = np.int64(nodes[NODE_WIDTH * child + DEPTH])
        end: Int = min(low, length)
        matched += 1
        while matched < end and tokens[there + matched] == tokens[start + matched]:
            matched += 1
        if matched < low:
            child = split(row, nodes, tokens, child, matched, start, nodes[NODE_WIDTH * child + COUNT] - 1)
        nodes[NODE_WIDTH * child + POS] = start
        node = child


@jit
def _remove(row: Row, nodes: Pointer, tokens: Pointer, root: int, start: int, length: int) -> None:
    node = np.int64(root)
    matched = np.int64(0)
    while matched < length:
        child = child_of(row, nodes, node, tokens[start + matched])
        nodes[NODE_WIDTH * node + TOTAL] -= 1
        nodes[NODE_WIDTH * child + COUNT] -= 1
        if nodes[NODE_WIDTH * node + BEST] == child:
            nodes[NODE_WIDTH * node + BEST] = UNKNOWN
        if nodes[NODE_WIDTH * child + COUNT] == 0:
            _remove_leaf(row, nodes, node, child)
            break
        matched = np.int64(nodes[NODE_WIDTH * child + DEPTH])
        node = child
    if node != root:
        _merge(row, nodes, node)


@jit
def _remove_leaf(row: Row, nodes: Pointer, parent: int, leaf: int) -> None:
    before, after = nodes[NODE_WIDTH * leaf + PREVIOUS], nodes[NODE_WIDTH * leaf + NEXT]
    if before == NONE:
        nodes[NODE_WIDTH * parent + FIRST_CHILD] = after
    else:
        nodes[NODE_WIDTH * before + NEXT] = after
    if after != NONE:
        nodes[NODE_WIDTH * after + PREVIOUS] = before
    erase(row, nodes, find(row, nodes, parent, nodes[NODE_WIDTH * leaf + TOKEN]))
    free_node(row, nodes, leaf)


@jit
def _merge(row: Row, nodes: Pointer, node: int) -> None:
    """Dissolve a node that has one child and where no text ends."""
    child = np.int64(nodes[NODE_WIDTH * node + FIRST_CHILD])
    if child == NONE or nodes[NODE_WIDTH * child + NEXT] != NONE:
        return
    if nodes[NODE_WIDTH * node + COUNT] != nodes[NODE_WIDTH * child + COUNT]:
        return
    erase(row, nodes, find(row, nodes, node, nodes[NODE_WIDTH * child + TOKEN]))
    replace(row, nodes, node, child)
    nodes[NODE_WIDTH * child + PARENT] = nodes[NODE_WIDTH * node + PARENT]
    nodes[NODE_WIDTH * child + TOKEN] = nodes[NODE_WIDTH * node + TOKEN]
    free_node(row, nodes, node)


@jit
def locate(row: Row, ring: Pointer, root: int, tokens: Pointer, start: int, length: int) -> Int:
    """The node at or below the place of the pattern ``tokens[start : start + length]``, or NONE."""
    nodes = int32_at(row[NODES])
    node = np.int64(root)
    matched = np.int64(0)
    while matched < length:
        node = child_of(row, nodes, node, tokens[start + matched])
        if node == NONE:
            return node
        there = np.int64(nodes[NODE_WIDTH * node + POS])
        end: Int = min(np.int64(nodes[NODE_WIDTH * node + DEPTH]), length)
        matched += 1
        while matched < end:
            if ring[there + matched] != tokens[start + matched]:
                return np.int64(NONE)
            matched += 1
    return node


@compiled(types.int64(ROW))
def new_root(row: Row) -> Int:
    """The root of another trie over the same nodes."""
    return new_node(row, int32_at(row[NODES]), 0, 0, NONE, 0)


@compiled(types.void(ROW, types.int64))
def free_root(row: Row, root: int) -> None:
    """Give back a root below which no text is left."""
    free_node(row, int32_at(row[NODES]), root)


@compiled(types.void(ROW, types.int64, types.int64, types.int64, types.int64, types.int64))
def add_text(row: Row, root: int, address: int, begin: int, end: int, depth: int) -> None:
    """Enter all suffixes of the text at ring positions begin .. end - 1; there must be room for two nodes a token."""
    nodes, tokens = int32_at(row[NODES]), int64_at(address)
    for start in range(begin, end):
        _add(row, nodes, tokens, root, start, min(depth, end - start))


@compiled(types.void(ROW, types.int64, types.int64, types.int64, types.int64, types.int64))
def remove_text(row: Row, root: int, address: int, begin: int, end: int, depth: int) -> None:
    """Take all suffixes of a text out again; it must be the oldest below this root."""
    nodes, tokens = int32_at(row[NODES]), int64_at(address)
    for start in range(begin, end):
        _remove(row, nodes, tokens, root, start, min(depth, end - start))
