"""The compiled part: a suffix index per request, and one call per step that serves all requests.

**What is indexed.** The *context* of position p is the text read backwards from p: tokens p, p - 1, …, at most
``longest`` of them. The index of a request is a compressed trie of the contexts of its positions, entered by a hash of
their first ``shortest`` tokens. A node stands for the contexts that share their first DEPTH tokens and knows the latest
of their positions, so one way down finds the longest suffix that occurred before and where it did last::

    text   … a b c d …          node of DEPTH 2 for "c d"     POSITION   the latest position whose context starts d, c
                   ^                                          PARENT     the node above; ROOT for entry nodes
                   p                                          CHILD      the node below that the latest position is in
                                                              a leaf has DEPTH ``longest``

Edges live in one open-addressing hash table of ``fingerprint << 32 | node + 1``, 0 where free. A fingerprint is never
trusted: the tokens themselves are compared, at positions the nodes name. The text is not copied.

**Work.** A new position costs one way down, at most ``longest`` token comparisons and ``longest - shortest`` nodes
however long the text is, and in ordinary text a handful. So does a look-up, which also compares the last k positions
directly: a position is indexed only once k tokens follow it, so whatever the trie finds has a full continuation.
Memory: 16 bytes a node and 12 bytes of table; one node a token in text without repetition, never more than two.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import types
from numba.extending import intrinsic

from specdec.cpu.compile import compiled
from specdec.cpu.simd import kernel
from specdec_ngram.layout import (
    CAPACITY,
    CHILD,
    DEPTH,
    INDEXED,
    LAST_TOKEN,
    NODE_WIDTH,
    NODES,
    PARENT,
    POSITION,
    TABLE,
    USED,
    num_slots,
)

ROOT = -1
_NONE = -1
_FINGERPRINT_BITS = 31
_NODE_BITS = 32
_NODE_MASK = (1 << _NODE_BITS) - 1
Pointer: TypeAlias = Any
"""In compiled code: the address of an array, indexed without bounds checks."""
Int: TypeAlias = Any
"""In compiled code: a machine integer."""
_HASH_BASE = np.uint64(0x5851F42D4C957F2D)
_INT32, _INT64, _TABLE = types.int32[::1], types.int64[::1], types.int64[:, ::1]
_num_slots = kernel(num_slots)


@intrinsic
def _int64_at(typing_context: Any, address: Any) -> Any:
    """Cast an address to a pointer to int64."""
    return types.CPointer(types.int64)(types.int64), _cast


@intrinsic
def _int32_at(typing_context: Any, address: Any) -> Any:
    """Cast an address to a pointer to int32."""
    return types.CPointer(types.int32)(types.int64), _cast


def _cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@kernel
def _fingerprint(value: np.uint64) -> Int:
    """31 well-mixed bits of a uint64 (the finaliser of MurmurHash3)."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64(value >> np.uint64(33))


@kernel
def _edge(node: int, token: int) -> Int:
    """Fingerprint of the edge below ``node`` whose first token is ``token``."""
    return _fingerprint(np.uint64(node + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token))


@kernel
def _suffix_hash(tokens: Pointer, at: int, length: int) -> np.uint64:
    """Polynomial hash of the ``length`` tokens that end at position ``at``."""
    value = np.uint64(0)
    for i in range(at - length + 1, at + 1):
        value = value * _HASH_BASE + np.uint64(tokens[i] + 1)
    return value


@kernel
def _find(
    table: Pointer,
    slots: int,
    nodes: Pointer,
    tokens: Pointer,
    fingerprint: int,
    parent: int,
    low: int,
    high: int,
    at: int,
) -> Int:
    """Slot of the edge below ``parent`` that agrees with ``at``'s context in tokens low .. high - 1, or a free slot."""
    slot = fingerprint * slots >> _FINGERPRINT_BITS
    while table[slot] != 0:
        if table[slot] >> _NODE_BITS == fingerprint:
            node = NODE_WIDTH * ((table[slot] & _NODE_MASK) - 1)
            if nodes[node + PARENT] == parent:
                there = nodes[node + POSITION]
                i = low
                while i < high and tokens[there - i] == tokens[at - i]:
                    i += 1
                if i == high:
                    break
        slot = slot + 1 if slot + 1 < slots else 0
    return slot


@kernel
def _descend(
    table: Pointer,
    slots: int,
    nodes: Pointer,
    tokens: Pointer,
    at: int,
    suffix_hash: np.uint64,
    shortest: int,
    longest: int,
    insert: bool,
) -> tuple[Int, Int, Int]:
    """Follow the context of ``at`` from its entry as far as it is in the trie.

    Along the path of a node's latest position no edge needs to be looked up: the text at that position is compared
    instead. With ``insert``, the nodes passed learn that ``at`` is now their latest position.

    Returns:
        The last node reached (_NONE when there is no entry), the number of tokens matched, and the slot of the last
        edge looked for. Where fewer tokens are matched than the node's DEPTH, the context leaves the trie on the edge
        to the node; where they are equal and not ``longest``, the slot is free for an edge below the node.
    """
    slot = _find(table, slots, nodes, tokens, _fingerprint(suffix_hash), ROOT, 0, shortest, at)
    node = np.int64(_NONE)
    matched = np.int64(0)
    while table[slot] != 0:
        child = (table[slot] & _NODE_MASK) - 1
        if node == _NONE:
            matched = np.int64(shortest)
        elif insert:
            nodes[NODE_WIDTH * node + CHILD] = child
        node = child
        there = nodes[NODE_WIDTH * node + POSITION]
        end = min(longest, there + 1)
        while matched < end and tokens[there - matched] == tokens[at - matched]:
            matched += 1
        while nodes[NODE_WIDTH * node + DEPTH] < matched:
            if insert:
                nodes[NODE_WIDTH * node + POSITION] = at
            node = np.int64(nodes[NODE_WIDTH * node + CHILD])
        if matched < nodes[NODE_WIDTH * node + DEPTH]:
            break
        if insert:
            nodes[NODE_WIDTH * node + POSITION] = at
        if matched == longest:
            break
        slot = _find(table, slots, nodes, tokens, _edge(node, tokens[at - matched]), node, matched, matched + 1, at)
    return node, matched, slot


@kernel
def _new_node(nodes: Pointer, used: int, position: int, depth: int, parent: int) -> Int:
    nodes[NODE_WIDTH * used + POSITION] = position
    nodes[NODE_WIDTH * used + DEPTH] = depth
    nodes[NODE_WIDTH * used + PARENT] = parent
    nodes[NODE_WIDTH * used + CHILD] = _NONE
    return used + 1


@kernel
def _link(table: Pointer, slots: int, fingerprint: int, node: int) -> None:
    """Enter an edge that is known to be absent."""
    slot = fingerprint * slots >> _FINGERPRINT_BITS
    while table[slot] != 0:
        slot = slot + 1 if slot + 1 < slots else 0
    table[slot] = fingerprint << _NODE_BITS | (node + 1)


@kernel
def _split(
    table: Pointer,
    slots: int,
    nodes: Pointer,
    used: int,
    tokens: Pointer,
    at: int,
    suffix_hash: np.uint64,
    shortest: int,
    node: int,
    depth: int,
) -> Int:
    """Put a new node of ``depth`` on the edge to ``node``, whose latest position is ``at``."""
    parent = nodes[NODE_WIDTH * node + PARENT]
    if parent == ROOT:
        slot = _find(table, slots, nodes, tokens, _fingerprint(suffix_hash), ROOT, 0, shortest, at)
    else:
        above = nodes[NODE_WIDTH * parent + DEPTH]
        slot = _find(table, slots, nodes, tokens, _edge(parent, tokens[at - above]), parent, above, above + 1, at)
        nodes[NODE_WIDTH * parent + CHILD] = used
    table[slot] = (table[slot] & ~_NODE_MASK) | (used + 1)
    nodes[NODE_WIDTH * node + PARENT] = used
    there = nodes[NODE_WIDTH * node + POSITION]
    if there >= depth:  # else its context ends here with the text's beginning, and nothing can follow it further
        _link(table, slots, _edge(used, tokens[there - depth]), node)
    return _new_node(nodes, used, at, depth, parent)


@kernel
def _insert(
    table: Pointer,
    slots: int,
    nodes: Pointer,
    used: int,
    tokens: Pointer,
    at: int,
    suffix_hash: np.uint64,
    shortest: int,
    longest: int,
) -> Int:
    """Add the context of ``at``, the latest position so far; returns the nodes in use, at most two more."""
    node, matched, slot = _descend(table, slots, nodes, tokens, at, suffix_hash, shortest, longest, True)
    if node == _NONE:
        table[slot] = _fingerprint(suffix_hash) << _NODE_BITS | (used + 1)
        return _new_node(nodes, used, at, longest, ROOT)
    if matched == longest:
        return used
    if matched < nodes[NODE_WIDTH * node + DEPTH]:
        used = _split(table, slots, nodes, used, tokens, at, suffix_hash, shortest, node, matched)
        node = used - 1
    _link(table, slots, _edge(node, tokens[at - matched]), used)
    nodes[NODE_WIDTH * node + CHILD] = used
    return _new_node(nodes, used, at, longest, node)


@kernel
def _update(row: np.ndarray, tokens: Pointer, end: int, shortest: int, longest: int) -> Any:
    """Index the positions below ``end`` that are not yet; returns whether there was room for all."""
    slots = _num_slots(row[CAPACITY])
    table, nodes = _int64_at(row[TABLE]), _int32_at(row[NODES])
    begin = row[INDEXED]
    if begin > end or (begin > 0 and tokens[begin - 1] != row[LAST_TOKEN]):  # another text than before
        for slot in range(slots):
            table[slot] = 0
        row[USED] = 0
        begin = 0
    begin = max(begin, min(shortest - 1, end))
    used = row[USED]
    at = begin
    if at < end:
        drop = np.uint64(1)
        for _ in range(shortest - 1):
            drop *= _HASH_BASE
        suffix_hash = _suffix_hash(tokens, at, shortest)
        while used + 2 <= row[CAPACITY]:
            used = _insert(table, slots, nodes, used, tokens, at, suffix_hash, shortest, longest)
            at += 1
            if at == end:
                break
            suffix_hash -= np.uint64(tokens[at - shortest] + 1) * drop
            suffix_hash = suffix_hash * _HASH_BASE + np.uint64(tokens[at] + 1)
    row[USED] = used
    row[INDEXED] = at
    row[LAST_TOKEN] = tokens[at - 1] if at > 0 else 0
    return at == end


@kernel
def _look_up(row: np.ndarray, tokens: Pointer, length: int, wanted: int, k: int, shortest: int, longest: int) -> Int:
    """Position of the occurrence to copy from (its last token), or _NONE.

    The longest match decides, then the latest with ``wanted`` tokens after it, then the earliest.
    """
    slots = _num_slots(row[CAPACITY])
    table, nodes = _int64_at(row[TABLE]), _int32_at(row[NODES])
    at = length - 1
    suffix_hash = _suffix_hash(tokens, at, shortest)
    node, best, _ = _descend(table, slots, nodes, tokens, at, suffix_hash, shortest, longest, False)
    source: Int = np.int64(_NONE) if node == _NONE else np.int64(nodes[NODE_WIDTH * node + POSITION])
    best = max(best, shortest - 1)
    for distance in range(min(k - 1, at), 0, -1):
        there = at - distance
        end = min(longest, there + 1)
        matched = np.int64(0)
        while matched < end and tokens[there - matched] == tokens[at - matched]:
            matched += 1
        if matched > best or (matched == best and matched >= shortest and distance >= wanted):
            best = matched
            source = there
    return source


@compiled(types.int64(_TABLE, _INT64, _INT64, _INT64, _INT32, *[types.int64] * 3, _INT64, _INT32))
def propose_all(
    state: np.ndarray,
    rows: np.ndarray,
    pointers: np.ndarray,
    lengths: np.ndarray,
    limits: np.ndarray,
    k: int,
    shortest: int,
    longest: int,
    token_ids: np.ndarray,
    counts: np.ndarray,
) -> Int:
    """Bring the index of every request up to date and copy its draft.

    Args:
        state: int64 [S, NUM_COLUMNS]: the indices of all requests; changed.
        rows: int64 [B]: each request's row of ``state``.
        pointers: int64 [B]: address of each request's tokens, int64.
        lengths: int64 [B]: how many there are.
        limits: int32 [B]: the most draft tokens of each request.
        k: the most draft tokens of any request ever; a larger limit counts as this.
        shortest, longest: bounds of the match's length.
        token_ids: int64 [at least B * k], receives the drafts, packed.
        counts: int32 [B], receives their lengths.

    Returns:
        The number of draft tokens, or -1 - r when the index of the batch's request r is full: make room and call again.
    """
    total = 0
    for r in range(len(rows)):
        counts[r] = 0
        wanted: Int = min(np.int64(limits[r]), k)
        length = lengths[r]
        if wanted <= 0 or length <= shortest:
            continue
        row = state[rows[r]]
        tokens = _int64_at(pointers[r])
        if not _update(row, tokens, max(length - k, 0), shortest, longest):
            return -1 - r
        source = _look_up(row, tokens, length, wanted, k, shortest, longest)
        if source != _NONE:
            counts[r] = min(wanted, length - 1 - source)
            for i in range(counts[r]):
                token_ids[total + i] = tokens[source + 1 + i]
            total += counts[r]
    return total


@compiled(types.void(_INT64, _INT64))
def move_table(old: np.ndarray, new: np.ndarray) -> None:
    """Enter all edges of one table (int64 [slots]) into a larger, empty one."""
    for entry in old:
        if entry != 0:
            _link(new, len(new), entry >> _NODE_BITS, (entry & _NODE_MASK) - 1)
