"""The Triton kernels: storing K/V, ancestors of tree nodes, attention, and joining the parts of long contexts.

A program of `attend` owns one K/V head of one request and up to BLOCK_M query rows. A row is a token and one of the
query heads that share the K/V head, so that K and V are read once for all of them and for all tokens of a verify step::

    row          0        1        2        3              two query heads per K/V head
    token, head  0, 0     0, 1     1, 0     1, 1

Scores, softmax and sums are float32 (online softmax, Milakov and Gimelshein 2018). Where the context is long and the
tokens few, it is cut into parts of fixed length with a program each, joined by their log-sum-exps (FlashDecoding); the
cut depends on positions alone, so a request's result does not depend on its neighbours.

In a tree, bit i of a token's words says whether it sees the i-th node of the window: the last 64 * WORDS nodes that the
request has, cached ones and those of this step, which hold the whole tree. Tokens before the window are a chain.
"""

# Triton reads annotations other than tl.constexpr, so there are none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kv(
    key,
    key_token_stride,
    key_head_stride,
    value,
    value_token_stride,
    value_head_stride,
    slots,
    keys,
    values,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Copy K/V of one token into its slot, unless the slot is -1; grid (T)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    used = (head < KV_HEADS) & (d < HEAD_DIM) & (d + slot - d >= 0)
    k = tl.load(key + token * key_token_stride + head * key_head_stride + d, mask=used, other=0.0)
    tl.store(keys + (slot * KV_HEADS + head) * HEAD_DIM + d, k.to(keys.dtype.element_ty), mask=used)
    e = tl.arange(0, BLOCK_DV)[None, :]
    used = (head < KV_HEADS) & (e < V_HEAD_DIM) & (e + slot - e >= 0)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + e, mask=used, other=0.0)
    tl.store(values + (slot * KV_HEADS + head) * V_HEAD_DIM + e, v.to(values.dtype.element_ty), mask=used)


@triton.jit
def ancestor_words(
    parents, cached_parents, query_start_loc, words, depths, num_nodes, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write each token's ancestors and itself as bits, int64 [T, WORDS], and the depths of cached nodes.

    A request's nodes are ``num_nodes`` cached ones, then its tokens; ``depths`` is int32 [B, num_nodes].
    The grid is (B, blocks of nodes).
    """
    request = tl.program_id(0)
    start = tl.load(query_start_loc + request)
    count = num_nodes + tl.load(query_start_loc + request + 1) - start
    base = tl.maximum(count - 64 * WORDS, 0)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for word in tl.static_range(WORDS):
        first = base + 64 * word
        bits = tl.zeros([BLOCK], dtype=tl.int64)
        above = tl.zeros([BLOCK], dtype=tl.int32)
        node = tl.where(own < count, own, -1)
        while tl.max(node, axis=0) >= first:
            offset = node - first
            inside = (offset >= 0) & (offset < 64)
            bits |= tl.where(inside, tl.full([BLOCK], 1, tl.int64) << tl.where(inside, offset, 0).to(tl.int64), 0)
            of_cached = tl.load(
                cached_parents + request * num_nodes + node, mask=(node >= first) & (node < num_nodes), other=-1
            )
            of_token = tl.load(parents + start + node - num_nodes, mask=(node >= first) & (node >= num_nodes), other=-1)
            node = tl.maximum(of_cached, of_token)
            above += tl.where(node >= 0, 1, 0)
        token = own - num_nodes
        tl.store(words + (start + token).to(tl.int64) * WORDS + word, bits, mask=(token >= 0) & (own < count))
        if word == 0:
            tl.store(depths + request * num_nodes + own, above, mask=own < num_nodes)


@triton.jit
def _allowed(
    keys_at,
    end,
    request,
    start,
    count,
    context,
    token,
    query_positions,
    positions,
    words,
    depths,
    num_nodes,
    window,
    chunk,
    HAS_TREE: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """Who sees whom: [BLOCK_M, BLOCK_N] for the cached places ``keys_at`` before ``end``."""
    added = keys_at - context
    allowed = (added[None, :] <= token[:, None]) & (keys_at < end)[None, :]
    if HAS_TREE:
        base = tl.maximum(num_nodes + count - 64 * WORDS, 0)
        bit = num_nodes + added - base
        both = (bit >= 0)[None, :] & (num_nodes + token - base >= 0)[:, None] & (keys_at < end)[None, :]
        place = (start + token).to(tl.int64)[:, None] * WORDS + (bit // 64)[None, :]
        word = tl.load(words + place, mask=both, other=-1)
        seen = (word >> tl.where(bit >= 0, bit % 64, 0).to(tl.int64)[None, :]) & 1
        allowed = allowed & (seen > 0)
    if HAS_WINDOW or HAS_CHUNK:
        new = (added >= 0) & (keys_at < end)
        key_positions = tl.where(new, tl.load(positions + start + added, mask=new, other=0), keys_at.to(tl.int64))
        if HAS_TREE:
            node = num_nodes + added
            is_cached = (node >= 0) & (added < 0)
            depth = tl.load(depths + request * num_nodes + node, mask=is_cached, other=0)
            key_positions = tl.where(is_cached, (context - num_nodes + depth).to(tl.int64), key_positions)
        if HAS_WINDOW:
            allowed = allowed & (query_positions[:, None] - key_positions[None, :] < window)
        if HAS_CHUNK:
            allowed = allowed & ((query_positions // chunk)[:, None] == (key_positions // chunk)[None, :])
    return allowed


@triton.jit
def attend(
    query,
    query_token_stride,
    query_head_stride,
    keys,
    values,
    block_tables,
    table_stride,
    query_start_loc,
    seq_lens,
    positions,
    words,
    depths,
    num_nodes,
    sinks,
    out,
    log_sums,
    scaling,
    softcap,
    window,
    chunk,
    query_blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Attention of BLOCK_M rows of a request over its context; grid (B * query_blocks, K/V heads, parts).

    WIDEN makes products float32 (the interpreter has none of bfloat16). PART is 0 when contexts are not cut; otherwise
    ``out`` is float32 [T, heads, parts, V_HEAD_DIM] and ``log_sums`` float32 [T, heads, parts].
    """
    request = tl.program_id(0) // query_blocks
    first_row = tl.program_id(0) % query_blocks * BLOCK_M
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(query_start_loc + request)
    count = tl.load(query_start_loc + request + 1) - start
    length = tl.load(seq_lens + request)
    if (first_row >= count * GROUP) | (part * PART >= length):
        return
    context = length - count
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < count * GROUP
    token = tl.minimum(row // GROUP, count - 1)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    at = (start + token).to(tl.int64)
    q = tl.load(
        query + at[:, None] * query_token_stride + head[:, None] * query_head_stride + d[None, :],
        mask=real[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    if WIDEN:
        q = q.to(tl.float32)
    query_positions = tl.load(positions + at)
    end = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, count - 1) + 1
    begin = 0
    if HAS_WINDOW or HAS_CHUNK:
        earliest = tl.min(query_positions, axis=0)
        if HAS_WINDOW:
            begin = tl.maximum(begin, earliest - window + 1)
        if HAS_CHUNK:
            begin = tl.maximum(begin, earliest // chunk * chunk)
        begin = (begin // BLOCK_N * BLOCK_N).to(tl.int32)
    if PART > 0:
        begin = tl.maximum(begin, part * PART)
        end = tl.minimum(end, part * PART + PART)

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        # The sink joins the denominator once: in the first part.
        sink = tl.load(sinks + head, mask=real & (row * 0 + part == 0), other=-float("inf")).to(tl.float32)
        top = sink
        total = tl.where(sink > -float("inf"), 1.0, 0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    for place in range(begin, end, BLOCK_N):
        keys_at = place + tl.arange(0, BLOCK_N)
        cached = keys_at < end
        block = tl.load(block_tables + request * table_stride + keys_at // BLOCK_SIZE, mask=cached, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + keys_at % BLOCK_SIZE
        k = tl.load(
            keys + (slot[None, :] * KV_HEADS + kv_head) * HEAD_DIM + d[:, None],
            mask=cached[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        allowed = _allowed(
            keys_at, end, request, start, count, context, token, query_positions, positions, words, depths, num_nodes,
            window, chunk, HAS_TREE, WORDS, HAS_WINDOW, HAS_CHUNK,
        )  # fmt: skip
        scores = tl.where(allowed, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(
            values + (slot[:, None] * KV_HEADS + kv_head) * V_HEAD_DIM + e[None, :],
            mask=cached[:, None] & (e < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        weights = weights.to(values.dtype.element_ty)
        if WIDEN:
            v, weights = v.to(tl.float32), weights.to(tl.float32)
        sums = sums * decay[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher

    some = total > 0
    result = sums / tl.where(some, total, 1.0)[:, None]
    place = at * (KV_HEADS * GROUP) + head
    if PART > 0:
        place = place * tl.num_programs(2) + part
        log_sum = tl.where(some, tl.where(some, top, 0.0) + tl.log(tl.where(some, total, 1.0)), -float("inf"))
        tl.store(log_sums + place, log_sum, mask=real)
    goal = out + place[:, None] * V_HEAD_DIM + e[None, :]
    tl.store(goal, result.to(out.dtype.element_ty), mask=real[:, None] & (e < V_HEAD_DIM)[None, :])


@triton.jit
def join_parts(
    parts,
    log_sums,
    query_start_loc,
    seq_lens,
    out,
    num_parts,
    HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The parts of one head of one token, weighted by their sums; grid (B, most tokens of a request, heads)."""
    request = tl.program_id(0)
    token = tl.program_id(1)
    start = tl.load(query_start_loc + request)
    if token >= tl.load(query_start_loc + request + 1) - start:
        return
    used = (tl.load(seq_lens + request) + PART - 1) // PART
    p = tl.arange(0, PARTS)
    e = tl.arange(0, BLOCK_DV)
    row = (start + token).to(tl.int64) * HEADS + tl.program_id(2)
    log_sum = tl.load(log_sums + row * num_parts + p, mask=p < used, other=-float("inf"))
    top = tl.max(log_sum, axis=0)
    weights = tl.exp(log_sum - tl.where(top == -float("inf"), 0.0, top))
    of_part = tl.load(
        parts + (row * num_parts + p)[:, None] * V_HEAD_DIM + e[None, :],
        mask=(p < used)[:, None] & (e < V_HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    result = tl.sum(weights[:, None] * of_part, axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V_HEAD_DIM + e, result.to(out.dtype.element_ty), mask=e < V_HEAD_DIM)
