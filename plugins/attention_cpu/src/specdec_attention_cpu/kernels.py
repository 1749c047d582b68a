"""The compiled region of one attention layer: store new K/V in the paged cache, then attend.

Work is cut into items of (request, some of its query rows, one K/V head, a range of chunks of CHUNK tokens). All query
heads that share the K/V head and all rows of the item are computed together, so that each K/V row is read once for
them. A chunk gives every row its scores' maximum, the sum of exponentials and the weighted values; chunks are merged
one after another in the order of positions. Whether one item covers all chunks of a request or each chunk is an item
of its own (a long context alone in the batch, spread over the cores) changes nothing in the arithmetic: a token's
result depends neither on the batch nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.layout import BFLOAT16, FLOAT32, LANES, PANEL
from specdec.cpu.simd import (
    broadcast,
    exp,
    float_word,
    fma,
    get_byte,
    get_float32,
    get_int32,
    get_int64,
    kernel,
    load,
    load_float32,
    max_lanes,
    prefetch,
    put_float32,
    put_int64,
    scalar_exp,
    store,
    store_float32,
    sum_lanes,
    tanh,
    vmax,
    word,
)
from specdec.cpu.threads import add_atomically, barrier, share, thread_count, thread_index
from specdec.cpu.tiles import num_tiles, tile
from specdec_attention_cpu.layout import (
    CHUNK,
    MERGE_WORDS,
    ROWS_BYTES,
    SCORE_STRIDE,
    TASK_WORDS,
    Attention,
    Merge,
    Step,
    Task,
)
from specdec_attention_cpu.packing import outside_to_minus_infinity, pack_keys, pack_values

_F = np.float32
_ZERO, _ONE, _NOTHING = _F(0.0), _F(1.0), _F(-np.inf)


@kernel
def _round_up(value: int, step: int) -> int:
    """The next multiple of ``step``."""
    return (value + step - 1) // step * step


@kernel
def _step(block: int, name: Any) -> int:
    return word(word(block, Attention.STEP), name)


@kernel
def _element_size(kind: int) -> int:
    return 2 if kind == BFLOAT16 else 4


@kernel
def _store_rows(
    block: int, source: int, token_stride: int, head_stride: int, width: int, cache: int, token: int
) -> None:
    """Copy one token's K or V heads to its slot."""
    kind, kv_heads = _step(block, Step.KIND), _step(block, Step.KV_HEADS)
    slot = get_int64(_step(block, Step.SLOTS) + 8 * token)
    if slot >= 0:
        target = cache + slot * kv_heads * width * _element_size(kind)
        for head in range(kv_heads):
            row = source + token * token_stride + head * head_stride
            for i in range(0, width, LANES):
                store(kind, target + head * width * _element_size(kind), i, width, load(kind, row, i, width))


@kernel
def _store_new(block: int, thread: int, threads: int) -> None:
    """Write K and V of the batch's tokens into the cache; threads share the tokens."""
    tokens = _step(block, Step.TOKENS)
    for token in range(share(tokens, thread, threads), share(tokens, thread + 1, threads)):
        _store_rows(
            block,
            _step(block, Step.KEY),
            _step(block, Step.KEY_TOKEN_STRIDE),
            _step(block, Step.KEY_HEAD_STRIDE),
            _step(block, Step.HEAD_DIM),
            word(block, Attention.KEY_CACHE),
            token,
        )
        _store_rows(
            block,
            _step(block, Step.VALUE),
            _step(block, Step.VALUE_TOKEN_STRIDE),
            _step(block, Step.VALUE_HEAD_STRIDE),
            _step(block, Step.V_HEAD_DIM),
            word(block, Attention.VALUE_CACHE),
            token,
        )


@kernel
def _load_queries(block: int, task: int, head: int, group: int, out: int, stride: int) -> None:
    """Scaled query vectors of an item as float32 rows, ordered by row, then by query head."""
    kind, width = _step(block, Step.KIND), _step(block, Step.HEAD_DIM)
    scaling = broadcast(float_word(block, Attention.SCALING))
    first, end = word(task, Task.FIRST_ROW), word(task, Task.END_ROW)
    for row in range(first, end):
        token = word(task, Task.FIRST_TOKEN) + row
        source = _step(block, Step.QUERY) + token * _step(block, Step.QUERY_TOKEN_STRIDE)
        for g in range(group):
            vector = source + (head * group + g) * _step(block, Step.QUERY_HEAD_STRIDE)
            target = out + ((row - first) * group + g) * stride
            for i in range(0, width, LANES):
                store(FLOAT32, target, i, width, load(kind, vector, i, width) * scaling)


@kernel
def _find_rows(block: int, task: int, head: int, first: int, end: int, rows: int) -> None:
    """Addresses of the cache rows of positions ``first`` to ``first + 31``: 32 for K, then 32 for V.

    From ``end`` on, the row of ``first`` stands in: it is finite, and its weight will be 0.
    """
    size, kv_heads = _element_size(_step(block, Step.KIND)), _step(block, Step.KV_HEADS)
    k_width, v_width = _step(block, Step.HEAD_DIM) * size, _step(block, Step.V_HEAD_DIM) * size
    table = _step(block, Step.BLOCK_TABLES) + word(task, Task.REQUEST) * _step(block, Step.BLOCK_TABLE_STRIDE)
    block_size = _step(block, Step.BLOCK_SIZE)
    keys = word(block, Attention.KEY_CACHE) + head * k_width
    values = word(block, Attention.VALUE_CACHE) + head * v_width
    column, offset = first // block_size, first % block_size
    stand_in = get_int32(table + 4 * column) * block_size + offset
    slot = stand_in
    for i in range(PANEL):
        row = slot * kv_heads if first + i < end else stand_in * kv_heads
        put_int64(rows + 8 * i, keys + row * k_width)
        put_int64(rows + 8 * (PANEL + i), values + row * v_width)
        slot, offset = slot + 1, offset + 1
        if offset == block_size and first + i + 1 < end:
            column, offset = column + 1, 0
            slot = get_int32(table + 4 * column) * block_size


@kernel
def _prefetch_rows(block: int, rows: int) -> None:
    """Start fetching the cache rows whose addresses `_find_rows` has found."""
    size = _element_size(_step(block, Step.KIND))
    k_width, v_width = _step(block, Step.HEAD_DIM) * size, _step(block, Step.V_HEAD_DIM) * size
    for i in range(PANEL):
        key, value = get_int64(rows + 8 * i), get_int64(rows + 8 * (PANEL + i))
        for line in range(0, k_width, 64):
            prefetch(key + line)
        for line in range(0, v_width, 64):
            prefetch(value + line)


@kernel
def _visible_from(block: int, position: int) -> int:
    """The first position that a token at ``position`` may attend to."""
    first, window, size = 0, word(block, Attention.WINDOW), word(block, Attention.CHUNK_SIZE)
    if window > 0:
        first = max(first, position - window + 1)
    if size > 0:
        first = max(first, position // size * size)
    return first


@kernel
def _hide_other_branches(
    block: int, task: int, row: int, from_position: int, first: int, end: int, scores: int
) -> None:
    """Hide the tree's tokens in ``first .. end`` that are not ancestors of ``row`` or lie outside its window."""
    cached = word(task, Task.CACHED_NODES)
    nodes, context = cached + word(task, Task.NUM_ROWS), word(task, Task.CONTEXT)
    ancestors = _step(block, Step.TREES) + word(task, Task.TREE) + (cached + row) * nodes
    position = get_int64(_step(block, Step.POSITIONS) + 8 * (word(task, Task.FIRST_TOKEN) + row))
    for place in range(max(first, context - cached), min(end, context + row + 1)):
        levels = get_byte(ancestors + place - context + cached)
        if levels == 0 or position - (levels - 1) < from_position:
            put_float32(scores + 4 * (place - first), _NOTHING)


@kernel
def _cap_and_mask(block: int, scores: int, width: int, first: int, end: int) -> None:
    """Soft cap, then -inf outside columns ``first .. end``, in place."""
    softcap = float_word(block, Attention.SOFTCAP)
    for i in range(0, width, LANES):
        x = load_float32(scores + 4 * i)
        if softcap > _ZERO:
            x = broadcast(softcap) * tanh(x / broadcast(softcap))
        store_float32(scores + 4 * i, outside_to_minus_infinity(x, first - i, end - i))


@kernel
def _weigh(scores: int, width: int, result: int) -> None:
    """Scores to weights in place; their maximum and the sum of weights to ``result``."""
    top = broadcast(_NOTHING)
    for i in range(0, width, LANES):
        top = vmax(load_float32(scores + 4 * i), top)
    maximum = max_lanes(top)
    shift = maximum if maximum > _NOTHING else _ZERO
    total = broadcast(_ZERO)
    for i in range(0, width, LANES):
        weight = exp(load_float32(scores + 4 * i) - broadcast(shift))
        store_float32(scores + 4 * i, weight)
        total = total + weight
    put_float32(result, maximum)
    put_float32(result + 4, sum_lanes(total))


@kernel
def _weights_of_chunk(block: int, task: int, group: int, chunk: int, width: int, scores: int, results: int) -> None:
    """Scores of all vectors of an item over one chunk to weights."""
    first, length, context = chunk * CHUNK, word(task, Task.LENGTH), word(task, Task.CONTEXT)
    result_bytes = _step(block, Step.RESULT_STRIDE)
    first_row, end_row = word(task, Task.FIRST_ROW), word(task, Task.END_ROW)
    positions = _step(block, Step.POSITIONS) + 8 * word(task, Task.FIRST_TOKEN)
    for row in range(first_row, end_row):
        visible_from = _visible_from(block, get_int64(positions + 8 * row))
        end = min(length, context + row + 1)
        for g in range(group):
            vector = (row - first_row) * group + g
            own = scores + vector * SCORE_STRIDE
            _cap_and_mask(block, own, width, visible_from - first, end - first)
            if word(task, Task.TREE) >= 0:
                _hide_other_branches(block, task, row, visible_from, first, first + width, own)
            _weigh(own, width, results + vector * result_bytes)


@kernel
def _multiply_tiles(
    team: int, kind: int, vectors: int, left: int, stride: int, panel: int, pairs: int, out: int, out_stride: int
) -> None:
    """All vectors times one panel."""
    tiles = num_tiles(vectors)
    for t in range(tiles):
        row = share(vectors, t, tiles)
        count = share(vectors, t + 1, tiles) - row
        tile(team, kind, count, left + row * stride, stride, panel, pairs, out + row * out_stride, out_stride, panel, 0)


@kernel
def _attend_chunk(block: int, task: int, head: int, group: int, chunk: int, scratch: int, results: int) -> None:
    """One chunk for all vectors of an item; the unmerged result goes to ``results``."""
    team, kind = _step(block, Step.TEAM), _step(block, Step.KIND)
    k_dim, v_dim = _step(block, Step.HEAD_DIM), _step(block, Step.V_HEAD_DIM)
    vectors = (word(task, Task.END_ROW) - word(task, Task.FIRST_ROW)) * group
    queries = scratch + _step(block, Step.QUERIES)
    scores = scratch + _step(block, Step.SCORES)
    keys = scratch + _step(block, Step.KEYS)
    values = scratch + _step(block, Step.VALUES)
    rows = scratch + _step(block, Step.ROWS)
    first = chunk * CHUNK
    context_end = word(task, Task.CONTEXT) + word(task, Task.END_ROW)
    end = min(first + CHUNK, context_end)
    width = _round_up(end - first, PANEL)
    pair_bytes = 4 * PANEL if kind == BFLOAT16 else 8 * PANEL
    value_panel = width // 2 * pair_bytes
    _find_rows(block, task, head, first, end, rows)
    for column in range(0, width, PANEL):
        following = rows + ROWS_BYTES if column // PANEL % 2 == 0 else rows - ROWS_BYTES
        if first + column + PANEL < context_end:
            _find_rows(block, task, head, first + column + PANEL, context_end, following)
            _prefetch_rows(block, following)
        pack_keys(kind, rows, k_dim, keys)
        pack_values(kind, rows + 8 * PANEL, PANEL, v_dim, values + column // 2 * pair_bytes, value_panel)
        target = scores + 4 * column
        query_stride = _step(block, Step.QUERY_STRIDE)
        _multiply_tiles(team, kind, vectors, queries, query_stride, keys, k_dim // 2, target, SCORE_STRIDE)
        rows = following
    _weights_of_chunk(block, task, group, chunk, width, scores, results)
    for panel in range(_round_up(v_dim, PANEL) // PANEL):
        target, right = results + 4 * LANES + 4 * PANEL * panel, values + panel * value_panel
        _multiply_tiles(
            team, kind, vectors, scores, SCORE_STRIDE, right, width // 2, target, _step(block, Step.RESULT_STRIDE)
        )


@kernel
def _merge_vector(v_dim: int, running: int, added: int) -> None:
    """Merge the result of later positions into the running one."""
    old, new = get_float32(running), get_float32(added)
    if new == _NOTHING:
        return
    top = max(old, new)
    keep, take = _ONE, _ONE
    if old < top:
        keep = scalar_exp(old - top)
    if new < top:
        take = scalar_exp(new - top)
    put_float32(running, top)
    put_float32(running + 4, get_float32(running + 4) * keep + get_float32(added + 4) * take)
    for i in range(LANES, LANES + v_dim, LANES):
        kept = load_float32(running + 4 * i) * broadcast(keep)
        store_float32(running + 4 * i, fma(load_float32(added + 4 * i), broadcast(take), kept))


@kernel
def _write_vector(block: int, head: int, token: int, result: int) -> None:
    """Divide a finished result by its sum, with the sink joining in, and write it to the output."""
    kind, v_dim = _step(block, Step.KIND), _step(block, Step.V_HEAD_DIM)
    maximum, total = get_float32(result), get_float32(result + 4)
    factor = _ONE
    if word(block, Attention.SINKS) != 0:
        sink = get_float32(word(block, Attention.SINKS) + 4 * head)
        top = max(maximum, sink)
        factor = scalar_exp(maximum - top)
        total = total * factor + scalar_exp(sink - top)
    scale = broadcast(factor / total if total > _ZERO else _ZERO)
    out = word(block, Attention.OUTPUT)
    out += (token * _step(block, Step.HEADS) + head) * v_dim * _element_size(kind)
    for i in range(0, v_dim, LANES):
        store(kind, out, i, v_dim, load_float32(result + 4 * (LANES + i)) * scale)


@kernel
def _write_rows(block: int, head: int, group: int, token: int, num_rows: int, results: int) -> None:
    """Write the results of consecutive rows for the query heads of one K/V head."""
    stride = _step(block, Step.RESULT_STRIDE)
    for row in range(num_rows):
        for g in range(group):
            _write_vector(block, head * group + g, token + row, results + (row * group + g) * stride)


@kernel
def _first_chunk(block: int, task: int) -> int:
    """The chunk in which the item's first visible position lies."""
    positions = _step(block, Step.POSITIONS) + 8 * word(task, Task.FIRST_TOKEN)
    first = get_int64(positions + 8 * word(task, Task.FIRST_ROW))
    if word(task, Task.TREE) >= 0:  # its later rows can be shallower
        for row in range(word(task, Task.FIRST_ROW), word(task, Task.END_ROW)):
            first = min(first, get_int64(positions + 8 * row))
    return _visible_from(block, first) // CHUNK


@kernel
def _partial(block: int, partial: int, head: int) -> int:
    """Address of the results of a partial for one K/V head."""
    size = _step(block, Step.VECTORS) * _step(block, Step.RESULT_STRIDE)
    return _step(block, Step.PARTIALS) + (partial * _step(block, Step.KV_HEADS) + head) * size


@kernel
def _attend_item(block: int, task: int, head: int, group: int, scratch: int) -> None:
    """One item: all its chunks, and its output unless it is a partial one."""
    v_dim = _step(block, Step.V_HEAD_DIM)
    queries = scratch + _step(block, Step.QUERIES)
    added = scratch + _step(block, Step.ADDED)
    running = scratch + _step(block, Step.RUNNING)
    num_rows = word(task, Task.END_ROW) - word(task, Task.FIRST_ROW)
    stride, vectors = _step(block, Step.RESULT_STRIDE), num_rows * group
    if word(task, Task.PARTIAL) >= 0:
        running = _partial(block, word(task, Task.PARTIAL), head)
    start = max(word(task, Task.FIRST_CHUNK), _first_chunk(block, task))
    end = word(task, Task.END_CHUNK)
    if start >= end:
        for vector in range(vectors):
            put_float32(running + vector * stride, _NOTHING)
            put_float32(running + vector * stride + 4, _ZERO)
            for i in range(LANES, LANES + v_dim, LANES):
                store_float32(running + vector * stride + 4 * i, broadcast(_ZERO))
    _load_queries(block, task, head, group, queries, _step(block, Step.QUERY_STRIDE))
    for chunk in range(start, end):
        if chunk == start:
            _attend_chunk(block, task, head, group, chunk, scratch, running)
            continue
        _attend_chunk(block, task, head, group, chunk, scratch, added)
        for vector in range(vectors):
            _merge_vector(v_dim, running + vector * stride, added + vector * stride)
    if word(task, Task.PARTIAL) < 0:
        token = word(task, Task.FIRST_TOKEN) + word(task, Task.FIRST_ROW)
        _write_rows(block, head, group, token, num_rows, running)


@kernel
def _merge_item(block: int, merge: int, head: int, group: int) -> None:
    """Merge the partial results of one K/V head's vectors in the order of positions, and write them."""
    v_dim, stride = _step(block, Step.V_HEAD_DIM), _step(block, Step.RESULT_STRIDE)
    first = word(merge, Merge.FIRST_PARTIAL)
    running = _partial(block, first, head)
    num_rows = word(merge, Merge.NUM_ROWS)
    for partial in range(first + 1, first + word(merge, Merge.NUM_PARTIALS)):
        added = _partial(block, partial, head)
        for vector in range(num_rows * group):
            _merge_vector(v_dim, running + vector * stride, added + vector * stride)
    _write_rows(block, head, group, word(merge, Merge.TOKEN), num_rows, running)


@region
def attention_region(block: int) -> None:
    """Store the batch's K/V, attend, and merge; argument block `Attention`."""
    team = _step(block, Step.TEAM)
    thread, threads = thread_index(team), thread_count(team)
    kv_heads, tasks = _step(block, Step.KV_HEADS), _step(block, Step.TASKS)
    group = _step(block, Step.HEADS) // kv_heads
    scratch = _step(block, Step.SCRATCH) + thread * _step(block, Step.SCRATCH_STRIDE)
    _store_new(block, thread, threads)
    barrier(team, threads)
    ticket = add_atomically(word(block, Attention.STEP) + 8 * Step.TICKET.value, 1)
    while ticket < _step(block, Step.NUM_TASKS) * kv_heads:
        task = tasks + 8 * TASK_WORDS * (ticket // kv_heads)
        _attend_item(block, task, ticket % kv_heads, group, scratch)
        ticket = add_atomically(word(block, Attention.STEP) + 8 * Step.TICKET.value, 1)
    merges = _step(block, Step.NUM_MERGES)
    if merges > 0:
        barrier(team, threads)
        for item in range(share(merges * kv_heads, thread, threads), share(merges * kv_heads, thread + 1, threads)):
            merge = _step(block, Step.MERGES) + 8 * MERGE_WORDS * (item // kv_heads)
            _merge_item(block, merge, item % kv_heads, group)
