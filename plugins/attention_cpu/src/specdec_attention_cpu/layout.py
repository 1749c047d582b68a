"""What the backend and its kernels agree on: argument blocks and sizes; imports nothing heavy."""

from __future__ import annotations

from enum import IntEnum

from specdec.cpu.layout import PANEL

CHUNK = 256
"""Tokens per chunk; also the width of the score rows in scratch."""

SCORE_STRIDE = 4 * CHUNK + 64
"""Bytes between the score rows of two query vectors."""

ROWS_BYTES = 2 * 8 * PANEL
"""Addresses of the cache rows of 32 tokens, K and V."""

MAX_VECTORS = 64
"""Query vectors (rows times the query heads of a K/V head) per item, unless one row alone has more."""


class Attention(IntEnum):
    """Words of the argument block of `attention_region` in the kernels: what differs from layer to layer."""

    STEP = 0
    """Address of the step's block, `Step`."""
    OUTPUT = 1
    """[tokens, heads, v_head_dim], contiguous."""
    KEY_CACHE = 2
    VALUE_CACHE = 3
    SCALING = 4
    """float32 in the low half, like SOFTCAP."""
    SOFTCAP = 5
    """0: none."""
    WINDOW = 6
    """0: none."""
    CHUNK_SIZE = 7
    """0: none."""
    SINKS = 8
    """float32 [heads], or 0."""


class Step(IntEnum):
    """Words that the layers of a step share, those with the same numbers and widths of heads."""

    TEAM = 0
    KIND = 1
    HEADS = 2
    KV_HEADS = 3
    HEAD_DIM = 4
    V_HEAD_DIM = 5
    QUERY = 6
    """[tokens, heads, head_dim]; the two strides are in bytes, a head is contiguous."""
    QUERY_TOKEN_STRIDE = 7
    QUERY_HEAD_STRIDE = 8
    KEY = 9
    KEY_TOKEN_STRIDE = 10
    KEY_HEAD_STRIDE = 11
    VALUE = 12
    VALUE_TOKEN_STRIDE = 13
    VALUE_HEAD_STRIDE = 14
    TOKENS = 15
    SLOTS = 16
    """int64 [tokens]; negative: do not store."""
    POSITIONS = 17
    """int64 [tokens]."""
    BLOCK_TABLES = 18
    """int32, rows BLOCK_TABLE_STRIDE bytes apart."""
    BLOCK_TABLE_STRIDE = 19
    BLOCK_SIZE = 20
    TASKS = 21
    """int64 [NUM_TASKS][TASK_WORDS]."""
    NUM_TASKS = 22
    MERGES = 23
    """int64 [NUM_MERGES][MERGE_WORDS]."""
    NUM_MERGES = 24
    TREES = 25
    """bytes: of each request with a tree a matrix [nodes][nodes], cached nodes before rows: 0 for what a node does not
    see, else 1 and how many levels above it the other is. Drafts have far fewer than 255 levels."""
    TICKET = 26
    """The next item's number; 0 at the start of every layer."""
    PARTIALS = 27
    """Results: RESULT_STRIDE bytes per (partial, K/V head, vector)."""
    VECTORS = 28
    """The most query vectors of an item."""
    SCRATCH = 29
    SCRATCH_STRIDE = 30
    """Bytes of scratch per thread. What follows are offsets of its parts."""
    QUERIES = 31
    """float32 rows of QUERY_STRIDE bytes: the item's scaled query vectors."""
    SCORES = 32
    """float32 rows of SCORE_STRIDE bytes."""
    KEYS = 33
    """One K panel."""
    VALUES = 34
    """V panels of one chunk."""
    ADDED = 35
    """Results of one chunk: RESULT_STRIDE bytes per vector."""
    RUNNING = 36
    """Results so far."""
    ROWS = 37
    """Addresses of 32 cache rows for K, then for V; twice."""
    QUERY_STRIDE = 38
    RESULT_STRIDE = 39
    """Bytes of one vector's result: maximum, sum and 14 unused floats, then whole panels of output."""


class Task(IntEnum):
    """Words of a task: what an item covers, but for the K/V head."""

    REQUEST = 0
    FIRST_TOKEN = 1
    """Index in the batch of the request's first token."""
    FIRST_ROW = 2
    END_ROW = 3
    """Rows of the request's tokens in this batch."""
    CONTEXT = 4
    """Tokens of the request that are not in this batch."""
    LENGTH = 5
    """All its tokens."""
    FIRST_CHUNK = 6
    END_CHUNK = 7
    PARTIAL = 8
    """Where to leave the unmerged result; -1: write the output."""
    TREE = 9
    """Offset of its matrix in TREES; -1: a chain."""
    NUM_ROWS = 10
    """Rows of the request in this batch."""
    CACHED_NODES = 11
    """How many of the last tokens before this batch are nodes of its tree."""


class Merge(IntEnum):
    """Words of a merge of partial results."""

    TOKEN = 0
    """Index in the batch of the first row."""
    NUM_ROWS = 1
    FIRST_PARTIAL = 2
    NUM_PARTIALS = 3


TASK_WORDS, MERGE_WORDS = len(Task), len(Merge)
