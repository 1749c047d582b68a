"""What the code that calls the kernels and the kernels themselves agree on; imports neither numba nor torch.

Each region reads an int64 argument block whose words are named by the enumerations below.
"""

from __future__ import annotations

from enum import IntEnum

LANES = 16
"""Elements of a vector."""

PANEL = 32
"""Columns of a panel (`specdec.cpu.tiles`)."""

FLOAT32, BFLOAT16 = 0, 1
"""Element kinds of memory that kernels read and write."""

STORE, ADD, SILU, GELU_TANH = range(4)
"""What happens to a product: stored, added to what is there, or gated (a panel holds 16 gate and 16 up columns)."""

LINEAR_WORDS = 6
"""int64 words of a linear's description (`specdec.cpu.dense`); `specdec.target.linear` builds it."""
NORM_WORDS = 4
"""int64 words of a norm's description."""

MOST_TILE_ROWS = 12
"""Rows of a tile on the processors that have most registers."""
TILE_BYTES = 4 * MOST_TILE_ROWS * PANEL
"""Room for the products of a tile on any processor."""

FEW_ROWS = 8
"""Up to this many rows, every thread prepares the left sides of products for itself."""

TEAM_TILE_ENTRY = 24
"""Where a team's state (`specdec.cpu.team`) holds the address of `specdec.cpu.tiles.tile_entry`."""

THREAD_NUM, NUM_THREADS, YIELD, ARRIVED, GENERATION, STATE_BYTES = 0, 8, 16, 64, 128, 192
"""A team's state: entry points of the OpenMP runtime and, at `TEAM_TILE_ENTRY`, of `specdec.cpu.tiles`; then, in cache
lines of their own, the barrier's two counters."""


class Product(IntEnum):
    """Words of the argument block of `specdec.cpu.regions.linear_region`."""

    TEAM = 0
    LINEAR = 1
    """Address of the linear's description."""
    KIND = 2
    """Element kind of input and output."""
    INPUT = 3
    """[ROWS, INPUT_WIDTH], INPUT_STRIDE bytes apart."""
    INPUT_STRIDE = 4
    INPUT_WIDTH = 5
    ROWS = 6
    MODE = 7
    """STORE, SILU or GELU_TANH."""
    OUTPUT = 8
    OUTPUT_STRIDE = 9
    SCRATCH = 10
    """As in `Step`, with one area."""
    SCRATCH_STRIDE = 11
    BLOCK_ROWS = 12
    NORM = 13
    """Address of the description of a norm that is applied to the input first, or 0."""


class Gather(IntEnum):
    """Words of the argument block of `specdec.cpu.regions.gather_region`."""

    TEAM = 0
    PANELS = 1
    """A packed weight (`specdec.cpu.tiles`)."""
    ROW_WORDS = 2
    """32-bit words per row of the original weight."""
    INDEX = 3
    """int64 [ROWS]: rows of the original weight."""
    ROWS = 4
    OUTPUT = 5
    """[ROWS], ROW_WORDS words each."""
    NUM_ROWS = 6
    """Rows that the weight has."""
    OUTSIDE = 7
    """Counts indices that are not rows of the weight."""


class Norm(IntEnum):
    """Words of the argument block of `specdec.cpu.regions.norm_region`."""

    TEAM = 0
    NORM = 1
    """Address of the norm's description."""
    KIND = 2
    INPUT = 3
    INPUT_STRIDE = 4
    ROWS = 5
    OUTPUT = 6
    OUTPUT_STRIDE = 7


class Step(IntEnum):
    """Words of the block that all layers of a forward pass share."""

    TEAM = 0
    KIND = 1
    ROWS = 2
    HIDDEN = 3
    """The residual stream, [ROWS, hidden size], contiguous."""
    QKV = 4
    """[ROWS, query, key and value heads], contiguous."""
    ATTENDED = 5
    """Output of attention, [ROWS, heads * v_head_dim], contiguous."""
    COS = 6
    SIN = 7
    """[ROWS, ROTARY], contiguous."""
    ROTARY = 8
    SCRATCH = 9
    """Two areas of BLOCK_ROWS rows of SCRATCH_STRIDE bytes, then for each thread FEW_ROWS rows and TILE_BYTES."""
    SCRATCH_STRIDE = 10
    BLOCK_ROWS = 11
    INPUT = 12
    """What a layer without input norm projects to queries, keys and values: [ROWS, Layer.INPUT_WIDTH], contiguous."""


class Layer(IntEnum):
    """Words that describe one decoder layer."""

    HIDDEN_SIZE = 0
    QUERY_HEADS = 1
    KEY_HEADS = 2
    HEAD_DIM = 3
    QKV_WIDTH = 4
    ATTENDED_WIDTH = 5
    ACTIVATION = 6
    INPUT_NORM = 7
    """Addresses of descriptions, from here on; INPUT_NORM, QUERY_NORM and KEY_NORM may be 0. Without an input norm the
    projection takes Step.INPUT as it is."""
    QKV = 8
    QUERY_NORM = 9
    KEY_NORM = 10
    OUTPUT = 11
    POST_NORM = 12
    GATE_UP = 13
    DOWN = 14
    ROTATES = 15
    """1 if queries and keys are rotated, 0 if not."""
    INPUT_WIDTH = 16
    """Of the query, key and value projection."""


class Between(IntEnum):
    """Words of the argument block of `specdec.cpu.regions.between_attention_region`."""

    STEP = 0
    AFTER = 1
    """The layer whose attention has just been computed, or 0."""
    BEFORE = 2
    """The layer whose attention comes next, or 0."""
