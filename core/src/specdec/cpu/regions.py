"""The compiled entry points: what one call from Python does on all threads.

Each region reads an int64 argument block whose words are named in `specdec.cpu.layout`. Long inputs are processed in
blocks of rows, so that the float32 left sides of the products stay in the cores' caches.
"""

from __future__ import annotations

from specdec.cpu.compile import region
from specdec.cpu.dense import normalize, normalize_row, project, rotate_head, widen_rows
from specdec.cpu.layout import (
    ADD,
    BFLOAT16,
    FEW_ROWS,
    FLOAT32,
    PANEL,
    STORE,
    TILE_BYTES,
    Between,
    Gather,
    Layer,
    Norm,
    Product,
    Step,
)
from specdec.cpu.simd import get_int32, get_int64, kernel, put_int32, word
from specdec.cpu.threads import add_atomically, barrier, share, thread_count, thread_index


@kernel
def _size(kind: int) -> int:
    return 2 if kind == BFLOAT16 else 4


@kernel
def _linear(block: int, row: int, end: int, thread: int, threads: int) -> None:
    """One block of rows of `linear_region`."""
    team, kind = word(block, Product.TEAM), word(block, Product.KIND)
    in_stride, out_stride = word(block, Product.INPUT_STRIDE), word(block, Product.OUTPUT_STRIDE)
    shared, stride = word(block, Product.SCRATCH), word(block, Product.SCRATCH_STRIDE)
    products = shared + word(block, Product.BLOCK_ROWS) * stride + thread * (TILE_BYTES + FEW_ROWS * stride)
    source, width = word(block, Product.INPUT) + row * in_stride, word(block, Product.INPUT_WIDTH)
    together = end - row > FEW_ROWS
    left = shared if together else products + TILE_BYTES
    part, parts = (thread, threads) if together else (0, 1)
    norm = word(block, Product.NORM)
    if norm != 0:
        normalize(norm, kind, source, in_stride, end - row, left, stride, part, parts)
    else:
        widen_rows(kind, source, in_stride, width, end - row, left, stride, part, parts)
    if together:
        barrier(team, threads)
    project(
        team,
        word(block, Product.LINEAR),
        left,
        stride,
        end - row,
        word(block, Product.MODE),
        kind,
        word(block, Product.OUTPUT) + row * out_stride,
        out_stride,
        products,
        thread,
        threads,
    )
    if together:
        barrier(team, threads)


@region
def linear_region(block: int) -> None:
    """A packed linear, with its argument block `Product`."""
    team = word(block, Product.TEAM)
    thread, threads = thread_index(team), thread_count(team)
    rows, step = word(block, Product.ROWS), word(block, Product.BLOCK_ROWS)
    for row in range(0, rows, step):
        _linear(block, row, min(row + step, rows), thread, threads)


@region
def gather_region(block: int) -> None:
    """Rows of a packed weight in their original order, with its argument block `Gather`."""
    team, rows, num_words = word(block, Gather.TEAM), word(block, Gather.ROWS), word(block, Gather.ROW_WORDS)
    thread, threads = thread_index(team), thread_count(team)
    for row in range(share(rows, thread, threads), share(rows, thread + 1, threads)):
        index = get_int64(word(block, Gather.INDEX) + 8 * row)
        if index < 0 or index >= word(block, Gather.NUM_ROWS):
            add_atomically(block + 8 * Gather.OUTSIDE.value, 1)
            continue
        source = word(block, Gather.PANELS) + 4 * (index // PANEL * num_words * PANEL + index % PANEL)
        out = word(block, Gather.OUTPUT) + 4 * row * num_words
        for i in range(num_words):
            put_int32(out + 4 * i, get_int32(source + 4 * PANEL * i))


@region
def norm_region(block: int) -> None:
    """An RMS norm, with its argument block `Norm`."""
    team, kind, norm = word(block, Norm.TEAM), word(block, Norm.KIND), word(block, Norm.NORM)
    thread, threads = thread_index(team), thread_count(team)
    in_stride, out_stride = word(block, Norm.INPUT_STRIDE), word(block, Norm.OUTPUT_STRIDE)
    source, out, rows = word(block, Norm.INPUT), word(block, Norm.OUTPUT), word(block, Norm.ROWS)
    for row in range(share(rows, thread, threads), share(rows, thread + 1, threads)):
        normalize_row(norm, kind, source + row * in_stride, kind, out + row * out_stride)


@kernel
def _own_scratch(step: int, thread: int) -> int:
    """A thread's own scratch: TILE_BYTES for products, then FEW_ROWS rows."""
    stride, block_rows = word(step, Step.SCRATCH_STRIDE), word(step, Step.BLOCK_ROWS)
    return word(step, Step.SCRATCH) + 2 * block_rows * stride + thread * (TILE_BYTES + FEW_ROWS * stride)


@kernel
def _after_attention(step: int, layer: int, row: int, rows: int, thread: int, threads: int) -> None:
    """Output projection, residual sum, norm and gated MLP of one block of rows.

    Left sides of products are prepared by all threads together; few rows by every thread for itself, which saves
    two barriers and costs less.
    """
    team, kind, stride = word(step, Step.TEAM), word(step, Step.KIND), word(step, Step.SCRATCH_STRIDE)
    shared, products = word(step, Step.SCRATCH), _own_scratch(step, thread)
    inner = shared + word(step, Step.BLOCK_ROWS) * stride
    together = rows > FEW_ROWS
    left = shared if together else products + TILE_BYTES
    part, parts = (thread, threads) if together else (0, 1)
    hidden_stride = word(layer, Layer.HIDDEN_SIZE) * _size(kind)
    hidden = word(step, Step.HIDDEN) + row * hidden_stride
    width = word(layer, Layer.ATTENDED_WIDTH)
    attended = word(step, Step.ATTENDED) + row * width * _size(kind)
    widen_rows(kind, attended, width * _size(kind), width, rows, left, stride, part, parts)
    if together:
        barrier(team, threads)
    output, down = word(layer, Layer.OUTPUT), word(layer, Layer.DOWN)
    project(team, output, left, stride, rows, ADD, kind, hidden, hidden_stride, products, thread, threads)
    barrier(team, threads)
    normalize(word(layer, Layer.POST_NORM), kind, hidden, hidden_stride, rows, left, stride, part, parts)
    if together:
        barrier(team, threads)
    gate_up, activation = word(layer, Layer.GATE_UP), word(layer, Layer.ACTIVATION)
    project(team, gate_up, left, stride, rows, activation, FLOAT32, inner, stride, products, thread, threads)
    barrier(team, threads)
    project(team, down, inner, stride, rows, ADD, kind, hidden, hidden_stride, products, thread, threads)
    barrier(team, threads)


@kernel
def _rotate(step: int, layer: int, row: int, rows: int, thread: int, threads: int) -> None:
    """Head norms and rotary positions of the queries and keys of one block of rows."""
    kind, rotary = word(step, Step.KIND), word(step, Step.ROTARY) * word(layer, Layer.ROTATES)
    heads, width = word(layer, Layer.QUERY_HEADS), word(layer, Layer.HEAD_DIM) * _size(kind)
    both = heads + word(layer, Layer.KEY_HEADS)
    stride = word(layer, Layer.QKV_WIDTH) * _size(kind)
    for item in range(share(rows * both, thread, threads), share(rows * both, thread + 1, threads)):
        index = item % both
        token = row + item // both
        head = word(step, Step.QKV) + token * stride + index * width
        norm = word(layer, Layer.QUERY_NORM) if index < heads else word(layer, Layer.KEY_NORM)
        if norm != 0:
            normalize_row(norm, kind, head, kind, head)
        angle = token * rotary * _size(kind)
        rotate_head(kind, head, rotary, word(step, Step.COS) + angle, word(step, Step.SIN) + angle)


@kernel
def _before_attention(step: int, layer: int, row: int, rows: int, thread: int, threads: int) -> None:
    """Norm, query/key/value projection and rotary positions of one block of rows; see `_after_attention`."""
    team, kind, stride = word(step, Step.TEAM), word(step, Step.KIND), word(step, Step.SCRATCH_STRIDE)
    products = _own_scratch(step, thread)
    together = rows > FEW_ROWS
    left = word(step, Step.SCRATCH) if together else products + TILE_BYTES
    part, parts = (thread, threads) if together else (0, 1)
    hidden_stride = word(layer, Layer.HIDDEN_SIZE) * _size(kind)
    hidden = word(step, Step.HIDDEN) + row * hidden_stride
    qkv_stride = word(layer, Layer.QKV_WIDTH) * _size(kind)
    qkv = word(step, Step.QKV) + row * qkv_stride
    norm, width = word(layer, Layer.INPUT_NORM), word(layer, Layer.INPUT_WIDTH)
    if norm != 0:
        normalize(norm, kind, hidden, hidden_stride, rows, left, stride, part, parts)
    else:
        source = word(step, Step.INPUT) + row * width * _size(kind)
        widen_rows(kind, source, width * _size(kind), width, rows, left, stride, part, parts)
    if together:
        barrier(team, threads)
    linear = word(layer, Layer.QKV)
    project(team, linear, left, stride, rows, STORE, kind, qkv, qkv_stride, products, thread, threads)
    barrier(team, threads)
    _rotate(step, layer, row, rows, thread, threads)


@region
def between_attention_region(block: int) -> None:
    """What lies between two attentions, with its argument block `Between`: the rest of one layer, the start of the
    next."""
    step, after, before = word(block, Between.STEP), word(block, Between.AFTER), word(block, Between.BEFORE)
    team = word(step, Step.TEAM)
    thread, threads = thread_index(team), thread_count(team)
    total, block_rows = word(step, Step.ROWS), word(step, Step.BLOCK_ROWS)
    for row in range(0, total, block_rows):
        rows = min(block_rows, total - row)
        if after != 0:
            _after_attention(step, after, row, rows, thread, threads)
        if before != 0:
            _before_attention(step, before, row, rows, thread, threads)
