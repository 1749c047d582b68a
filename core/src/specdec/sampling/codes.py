"""Small numbers that stand for something, shared with compiled kernels; imports nothing."""

from __future__ import annotations

from enum import IntEnum

PLACEHOLDER_TOKEN_ID = -1
"""Fills padded positions of token-id arrays; never a real token."""
NAN_LOGITS = -2
"""In place of a token: the row has a NaN (or, at temperature above 0, +inf)."""
NO_TOKEN_LEFT = -3
"""In place of a token: every token of the row is masked."""


class Purpose(IntEnum):
    """Streams of noise; two draws that must be independent take two of them."""

    SAMPLE = 0
    """The token of a row: plain, bonus and `match`."""
    ACCEPT = 1
    """The uniform that accepts or rejects a draft token."""
    RECOVER = 2
    """The recovered token after a rejection."""
    DRAFT = 3
    """A proposer's own sampling."""
