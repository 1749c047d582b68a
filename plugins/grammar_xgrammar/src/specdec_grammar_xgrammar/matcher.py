"""One output on its way through a grammar."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.grammar import GrammarMatcher, bitmask_width


class XGrammarMatcher(GrammarMatcher):
    """XGrammar's matcher, asked only what it answers without complaint.

    The library writes a line to standard error when it is given a special token, or any token after the end; draft
    tokens may be both.
    """

    def __init__(self, matcher: Any, vocab_size: int, special_ids: frozenset[int], has_ends: bool) -> None:
        """Wrap a matcher.

        Args:
            matcher: `xgrammar.GrammarMatcher`.
            vocab_size: width of the logits.
            special_ids: tokens that are never part of a text.
            has_ends: whether the model has end tokens; if not, the library has one behind the vocabulary.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        self._own_mask = None if has_ends else np.zeros((1, bitmask_width(vocab_size + 1)), dtype=np.int32)

    def accept(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept`."""
        if not 0 <= token_id < self._vocab_size or token_id in self._special_ids or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """See `GrammarMatcher.fill_bitmask`."""
        if self._own_mask is None:
            self._matcher.fill_next_token_bitmask(bitmask, row)
        else:
            self._matcher.fill_next_token_bitmask(self._own_mask, 0)
            bitmask[row] = self._own_mask[0, : bitmask.shape[1]]

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        if self._own_mask is None:
            return bool(self._matcher.is_terminated())
        return bool(self._matcher.is_completed()) and not self._may_go_on()

    def suggest(self, limit: int) -> list[int]:
        """The only text that can follow, in the longest tokens; the model may spell it otherwise."""
        tokens: list[int] = self._matcher.find_jump_forward_tokens()
        return tokens[:limit]

    def _may_go_on(self) -> bool:
        assert self._own_mask is not None
        self._matcher.fill_next_token_bitmask(self._own_mask, 0)
        word, bit = divmod(self._vocab_size, 32)
        last = int(self._own_mask[0, word]) & ((1 << bit) - 1)
        return bool(self._own_mask[0, :word].any()) or last != 0
