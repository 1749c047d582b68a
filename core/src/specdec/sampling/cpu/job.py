"""The argument block of the sampling regions; imports nothing heavy."""

from __future__ import annotations

from enum import IntEnum

BLOCK = 1024
"""Tokens handled at a time, so that intermediate arrays stay in the first-level cache."""


class Job(IntEnum):
    """Words of the argument block of the sampling regions; addresses are 0 where a region does without."""

    TEAM = 0
    TICKET = 1
    """The next item; 0 at the start."""
    COUNT = 2
    """Entries E: rows to work on."""
    PARTS = 3
    """Ranges that the vocabulary of each entry is cut into."""
    VOCAB = 4
    BFLOAT16 = 5
    """1 if the logits are bfloat16, 0 if float32."""
    LOGITS = 6
    """[R, VOCAB], contiguous."""
    ROWS = 7
    """int64 [E], or 0 for rows 0 .. E - 1."""
    TEMPERATURE = 8
    """float32 [E]."""
    SEEDS = 9
    """int64 [E]."""
    POSITIONS = 10
    """int64 [E]."""
    PURPOSE = 11
    SCORES = 12
    """float64 [E, PARTS], out."""
    TOKENS = 13
    """int64 [E, PARTS], out."""
    SUMS = 14
    """float64 [E, PARTS], out."""
    NORMALIZERS = 15
    """float64 [E]."""
    LARGEST = 16
    """float32 [E]: the largest logit."""
    EXCLUDED = 17
    """int64 [E]."""
    PROBS = 18
    """float32 [N, VOCAB], contiguous."""
    PROB_ROWS = 19
    """int64 [E]."""

    # Of the regions over a whole step (`specdec.sampling.cpu.steps`): B requests with R rows and N draft tokens.
    # TEMPERATURE and SEEDS are those of the B requests, POSITIONS, SCORES, TOKENS, SUMS, NORMALIZERS and LARGEST of the
    # R rows.
    REQUESTS = 20
    ROW_START = 21
    """int32 [B + 1]."""
    DRAFT = 22
    """int64 [N]: the draft tokens."""
    PARENTS = 23
    """int32 [N], or 0 for chains."""
    STATES = 24
    """int64 [R]: what is known of each row; 0 at the start."""
    PENDING = 25
    """int64 [R + B]: ranges done of each row, then of each request's last token; 0 at the start."""
    WINNERS = 26
    """int64 [R]: the first largest token, or a code."""
    LAST_TICKET = 27
    """The next item of the last phase; 0 at the start."""
    FINISHED = 28
    """Threads without work left; 0 at the start."""
    WIDTH = 29
    """Columns of OUT."""
    OUT = 30
    """int64 [B, WIDTH]: `specdec.types.Verdict.token_ids`."""
    NUM_TOKENS = 31
    """int32 [B]."""
    PATH = 32
    """int32 [B, WIDTH - 1]: the accepted nodes, or 0 for chains."""
    NEXT_TICKET = 33
    """The next item of a phase in between; 0 at the start."""
