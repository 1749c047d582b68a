"""The compiled choice of drafts: from each match, the most frequent continuation; the best expected draft wins.

For every length l of a match (the last l tokens occurred before) the draft would be at most ``factor * l`` tokens long.
It follows from the place of the match the child with the largest COUNT; the probability of a token is its share of the
occurrences that go on, times that of the tokens before it, and the draft ends where that falls below ``least``. The
score is the sum of these probabilities: the accepted tokens to expect, if text is like the texts counted. The draft
with the largest score is taken, the one of the longest match among equals, and the request's own text before the store.

A trie ends at its depth. A draft that gets there goes on along the latest occurrence, with the probability it has.
"""

from __future__ import annotations

import numpy as np
from numba import types

from specdec.cpu.compile import compiled
from specdec_suffix import local, store
from specdec_suffix.layout import (
    COUNT,
    DEPTH,
    END,
    FIRST_ACTIVE,
    FIRST_CHILD,
    LENGTH,
    LENGTHS,
    LIMIT,
    LOCI,
    NEXT,
    NODE_WIDTH,
    NODES,
    NONE,
    PARENTS,
    POS,
    ROOT,
    STATE_ROW,
    TOKEN,
    TOKENS,
    TOTAL,
)
from specdec_suffix.tree import (
    ROW,
    Int,
    Pointer,
    Row,
    best_child,
    int32_at,
    int64_at,
    jit,
)

_NO_END = 1 << 62

NODE, MATCHED, PARENT_INDEX, ENTRY_TOKEN, ENTRY_WIDTH = range(5)
"""Fields of a place that a tree may grow to (int64): node at or below it, its depth, index of the draft token it
follows, its token."""


@jit
def _low(nodes: Pointer, node: int, depth: int) -> Int:
    """How far down the edge to a node may be followed; without end for nodes at the trie's depth."""
    low = np.int64(nodes[NODE_WIDTH * node + DEPTH])
    return low if low < depth else np.int64(_NO_END)


@jit
def _chain(
    row: Row,
    tokens: Pointer,
    end: int,
    node: int,
    matched: int,
    depth: int,
    budget: int,
    least: float,
    token_ids: np.ndarray,
    confidence: np.ndarray,
    write: bool,
) -> tuple[Int, float]:
    """Follow the best children from a place in a trie.

    Args:
        row: the trie.
        tokens: its text, known up to ``end`` or the next `END`.
        end: see there.
        node: the node at or below the place.
        matched: the place's depth.
        depth: the trie's depth.
        budget: most tokens.
        least: smallest probability.
        token_ids: int64, receives the tokens.
        confidence: float32, receives their probabilities.
        write: whether to.

    Returns:
        How many tokens, and the score.
    """
    nodes = int32_at(row[NODES])
    low = _low(nodes, node, depth)
    probability, score = 1.0, 0.0
    count = np.int64(0)
    while count < budget:
        if matched >= low:
            child = best_child(row, nodes, node)
            if child == NONE:
                break
            probability *= nodes[NODE_WIDTH * child + COUNT] / nodes[NODE_WIDTH * node + TOTAL]
            if probability < least:
                break
            node = child
            low = _low(nodes, node, depth)
        at = nodes[NODE_WIDTH * node + POS] + matched
        if at >= end or tokens[at] == END:
            break
        if write:
            token_ids[count] = tokens[at]
            confidence[count] = probability
        score += probability
        count += 1
        matched += 1
    return count, score


@jit
def _push(
    entries: np.ndarray,
    weights: np.ndarray,
    size: int,
    weight: float,
    node: int,
    matched: int,
    after: int,
    token: int,
    best: int,
) -> Int:
    """Keep a place to grow to: heaviest first, then by the draft token followed, then the best child, then by token."""
    at = size
    while at > 0:
        if weights[at - 1] > weight or (weights[at - 1] == weight and entries[at - 1, PARENT_INDEX] < after):
            break
        same = weights[at - 1] == weight and entries[at - 1, PARENT_INDEX] == after
        if same and node != best and (entries[at - 1, NODE] == best or entries[at - 1, ENTRY_TOKEN] < token):
            break
        weights[at] = weights[at - 1]
        for field in range(ENTRY_WIDTH):
            entries[at, field] = entries[at - 1, field]
        at -= 1
    weights[at] = weight
    entries[at, NODE] = node
    entries[at, MATCHED] = matched
    entries[at, PARENT_INDEX] = after
    entries[at, ENTRY_TOKEN] = token
    return size + 1


@jit
def _grow(
    row: Row,
    tokens: Pointer,
    end: int,
    node: int,
    matched: int,
    depth: int,
    least: float,
    weight: float,
    after: int,
    entries: np.ndarray,
    weights: np.ndarray,
    first: int,
    size: int,
    room: int,
) -> Int:
    """Add the places one token below a place to the sorted list ``entries[first:size]``; at most ``room`` are kept."""
    nodes = int32_at(row[NODES])
    if matched < _low(nodes, node, depth):
        at = nodes[NODE_WIDTH * node + POS] + matched
        if at >= end or tokens[at] == END:
            return size
        size = _push(entries[first:], weights[first:], size - first, weight, node, matched + 1, after, tokens[at], node)
        return first + min(size, room)
    best = best_child(row, nodes, node)
    child = np.int64(nodes[NODE_WIDTH * node + FIRST_CHILD])
    total = nodes[NODE_WIDTH * node + TOTAL]
    while child != NONE:
        share = weight * (nodes[NODE_WIDTH * child + COUNT] / total)
        if share >= least:
            token = nodes[NODE_WIDTH * child + TOKEN]
            size = _push(entries[first:], weights[first:], size - first, share, child, matched + 1, after, token, best)
            size = first + min(size, room)
        child = np.int64(nodes[NODE_WIDTH * child + NEXT])
    return size


@jit
def _tree(
    row: Row,
    tokens: Pointer,
    end: int,
    node: int,
    matched: int,
    depth: int,
    budget: int,
    least: float,
    token_ids: np.ndarray,
    confidence: np.ndarray,
    parents: np.ndarray,
    entries: np.ndarray,
    weights: np.ndarray,
    write: bool,
) -> tuple[Int, float]:
    """As `_chain`, for a tree: the most probable places first, wherever they branch off."""
    size = _grow(row, tokens, end, node, matched, depth, least, 1.0, -1, entries, weights, 0, 0, budget)
    count = np.int64(0)
    score = 0.0
    while count < size:
        weight = weights[count]
        if write:
            token_ids[count] = entries[count, ENTRY_TOKEN]
            confidence[count] = weight
            parents[count] = entries[count, PARENT_INDEX]
        score += weight
        count += 1
        size = _grow(
            row,
            tokens,
            end,
            entries[count - 1, NODE],
            entries[count - 1, MATCHED],
            depth,
            least,
            weight,
            count - 1,
            entries,
            weights,
            count,
            size,
            budget - count,
        )
    return count, score


@jit
def draft_from(
    row: Row,
    root: int,
    pattern: Pointer,
    length: int,
    tokens: Pointer,
    end: int,
    depth: int,
    limit: int,
    factor: float,
    least: float,
    beat: float,
    token_ids: np.ndarray,
    confidence: np.ndarray,
    parents: np.ndarray,
    entries: np.ndarray,
    weights: np.ndarray,
    trees: bool,
) -> tuple[Int, float]:
    """The best draft of one trie, written out if its score is above ``beat``.

    Args:
        row: the trie.
        root: its root, or NONE for the index of the request's own text, which knows where all matches are.
        pattern: the request's tokens.
        length: how many.
        tokens: the trie's text.
        end: its length.
        depth: the trie's depth.
        limit: the most draft tokens.
        factor: draft tokens for each matched token.
        least: smallest probability.
        beat: score to beat.
        token_ids: int64 [limit], receives the draft.
        confidence: float32 [limit], its probabilities.
        parents: int32 [limit], its parents when ``trees``.
        entries: int64 [limit + 1, ENTRY_WIDTH], scratch.
        weights: float64 [limit + 1], scratch.
        trees: whether drafts may branch.

    Returns:
        The number of draft tokens (-1 when none beats), and the score.
    """
    best_score = beat
    best_node, best_matched, best_budget = np.int64(NONE), np.int64(0), np.int64(0)
    longest = min(depth, length) if root != NONE else length - row[FIRST_ACTIVE]
    for matched in range(1, longest + 1):
        if root == NONE:
            node = np.int64(int32_at(row[LOCI])[(length - matched) % (depth + 1)])
        else:
            node = store.locate(row, tokens, root, pattern, length - matched, matched)
            if node == NONE:
                break
        budget: Int = min(limit, np.int64(factor * matched + 1e-6))
        if budget <= 0:
            continue
        if trees:
            _, score = _tree(
                row, tokens, end, node, matched, depth, budget, least,
                token_ids, confidence, parents, entries, weights, False,
            )  # fmt: skip
        else:
            _, score = _chain(row, tokens, end, node, matched, depth, budget, least, token_ids, confidence, False)
        if score > 0.0 and (score > best_score or (score == best_score and best_node != NONE)):
            best_score, best_node, best_matched, best_budget = score, node, np.int64(matched), budget
    if best_node == NONE:
        return np.int64(-1), beat
    if trees:
        count, _ = _tree(
            row, tokens, end, best_node, best_matched, depth, best_budget, least,
            token_ids, confidence, parents, entries, weights, True,
        )  # fmt: skip
    else:
        count, _ = _chain(
            row, tokens, end, best_node, best_matched, depth, best_budget, least, token_ids, confidence, True
        )
    return count, best_score


@compiled(
    types.int64(
        types.int64[:, ::1],  # state
        types.int64[:, ::1],
        ROW,  # store_row
        types.int64,  # ring
        types.int64,  # k
        types.int64,
        types.float64,
        types.float64,
        types.boolean,
        types.int64[::1],  # token_ids
        types.float32[::1],
        types.int32[:, ::1],
    )
)
def propose_all(
    state: np.ndarray,
    asked: np.ndarray,
    store_row: Row,
    ring: int,
    k: int,
    depth: int,
    factor: float,
    least: float,
    trees: bool,
    token_ids: np.ndarray,
    confidence: np.ndarray,
    told: np.ndarray,
) -> Int:
    """Bring the index of every request up to date and choose its draft.

    Args:
        state: int64 [S, NUM_COLUMNS]: the indices of all requests; changed.
        asked: int64 [NUM_ASKED, B]: what is to be known of each request.
        store_row: int64 [NUM_COLUMNS]: the trie of past responses.
        ring: address of the stored tokens.
        k: the most draft tokens of any request ever; a larger limit counts as this.
        depth: longest pattern counted.
        factor: draft tokens for each matched token.
        least: smallest probability of a draft token.
        trees: whether drafts may branch.
        token_ids: int64 [B * k], receives the drafts, packed.
        confidence: float32 [B * k], receives their probabilities.
        told: int32 [NUM_TOLD, B * k], receives their parents and lengths.

    Returns:
        The number of draft tokens, or -1 - r when the index of the batch's request r is full: make room and call again.
    """
    parents, counts = told[PARENTS], told[LENGTHS]
    entries = np.empty((k + 1, ENTRY_WIDTH), dtype=np.int64)
    weights = np.empty(k + 1, dtype=np.float64)
    total = 0
    for r in range(asked.shape[1]):
        counts[r] = 0
        row, length, pattern = state[asked[STATE_ROW, r]], asked[LENGTH, r], int64_at(asked[TOKENS, r])
        root = asked[ROOT, r]
        if not local.update(row, pattern, length, depth):
            return -1 - r
        limit: Int = min(asked[LIMIT, r], k)
        if limit <= 0:
            continue
        ids, probabilities, above = token_ids[total:], confidence[total:], parents[total:]
        count, score = draft_from(
            row, NONE, pattern, length, pattern, length, depth, limit, factor, least, 0.0,
            ids, probabilities, above, entries, weights, trees,
        )  # fmt: skip
        if root != NONE:
            other, _ = draft_from(
                store_row, root, pattern, length, int64_at(ring), _NO_END, depth, limit, factor, least, score,
                ids, probabilities, above, entries, weights, trees,
            )  # fmt: skip
            count = other if other > 0 else count
        if count > 0:
            counts[r] = count
            total += count
    return total
