"""Draft length by batch size: the setting ``num_speculative_tokens_per_batch_size``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from attrs import frozen

FORMS = "a list of [from, to, k] with batch sizes from <= to, or a table of {batch size: k}"


@frozen
class Schedule:
    """The most draft tokens per request for each number of decoding requests."""

    steps: tuple[tuple[int, int], ...]
    """(smallest batch size, k), by batch size; the last entry holds for all larger batches."""
    default: int
    """k below the first entry."""

    def limit(self, num_requests: int) -> int:
        """The k for a batch of that many decoding requests."""
        found = self.default
        for start, k in self.steps:
            if start > num_requests:
                break
            found = k
        return found

    @classmethod
    def parse(cls, value: Any, num_speculative_tokens: int) -> Schedule:
        """Read the setting's value; None is the same k for all.

        A list holds ``[from, to, k]`` (both ends included), a table ``{batch size: k}`` the k from that size on. Gaps
        keep the entry before them, and the last entry goes on.

        Raises:
            ValueError: the value has another form, ranges overlap, or a k is not from 0 to ``num_speculative_tokens``;
                the text is the end of "must be ...".
        """
        if value is None:
            return cls((), num_speculative_tokens)
        ranges = _ranges(value)
        for (_, last, _), (first, _, _) in pairwise(ranges):
            if first <= last:
                raise ValueError(f"{FORMS}, without overlap (batch size {first} has two entries)")
        for first, _, k in ranges:
            if k > num_speculative_tokens:
                raise ValueError(
                    f"{FORMS}, with k from 0 to num_speculative_tokens = {num_speculative_tokens} "
                    f"(batch size {first} has {k})"
                )
        return cls(tuple((first, k) for first, _, k in ranges), num_speculative_tokens)


def _ranges(value: Any) -> list[tuple[int, int, int]]:
    """The entries as (from, to, k) in order; a table's entries end where they begin."""
    entries: list[tuple[int, int, int]] = []
    if isinstance(value, Mapping):
        for size, k in value.items():
            text = str(size)
            if not text.isdigit() or not _is_count(k, 0) or int(text) < 1:
                raise ValueError(FORMS)
            entries.append((int(text), int(text), k))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 3:
                raise ValueError(FORMS)
            first, last, k = entry
            if not (_is_count(first, 1) and _is_count(last, 1) and _is_count(k, 0)) or first > last:
                raise ValueError(FORMS)
            entries.append((first, last, k))
    if not entries:
        raise ValueError(FORMS)
    return sorted(entries)


def _is_count(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
