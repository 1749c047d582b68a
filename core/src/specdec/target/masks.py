"""Reads attention patterns off the mask functions that transformers' models build.

Sliding windows and chunks exist in many models only as a mask. While a model is traced, `note_mask` stands in for the
mask
builder: it evaluates the model's own mask function at chosen positions, so the pattern needs no knowledge of the
    architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LARGEST_PROBE = 1 << 20
"""Positions beyond this are not probed; a window wider than it counts as none."""


@frozen
class MaskPattern:
    """Which earlier positions a token sees."""

    sliding_window: int | None = None
    chunk_size: int | None = None
    problem: str | None = None
    """Set when the pattern is something else: what it is, for the error message."""


def probe_pattern(allowed: Callable[[Tensor, Tensor], Tensor], max_position: int) -> MaskPattern:
    """Find out which pattern a mask function draws.

    Args:
        allowed: from int64 query positions [Q, 1] and key positions [1, K] to bool, broadcastable to [Q, K].
        max_position: the largest position of interest.

    Returns:
        The pattern, checked at many positions, or one whose ``problem`` says why it is none of those known.
    """
    far = min(4 * max_position + 5, LARGEST_PROBE)

    def row(query: int) -> Tensor:
        keys = torch.arange(min(query + 8, far + 8))
        seen = allowed(torch.tensor([[query]]), keys[None, :])
        return torch.broadcast_to(seen, (1, keys.numel()))[0].to(torch.bool)

    first = _first_seen(row(far))
    if first is None:
        return MaskPattern(problem="a token does not see itself")
    candidates = [MaskPattern()]
    if first > 0:
        below = _first_seen(row(first - 1))
        candidates = [MaskPattern(sliding_window=far - first + 1), MaskPattern(chunk_size=first - (below or 0))]
    for candidate in candidates:
        size = candidate.sliding_window or candidate.chunk_size or 16
        queries = {
            q for q in (0, 1, 2, 7, size - 1, size, size + 1, 2 * size - 1, 2 * size, far - 1, far) if 0 <= q <= far
        }
        if all(torch.equal(row(query), _expected(candidate, query, far)) for query in queries):
            return candidate
    return MaskPattern(problem="its attention mask is neither causal nor a causal sliding window nor causal chunks")


def _first_seen(row: Tensor) -> int | None:
    seen = row.nonzero().flatten()
    return int(seen[0]) if len(seen) else None


def _expected(pattern: MaskPattern, query: int, far: int) -> Tensor:
    keys = torch.arange(min(query + 8, far + 8))
    row = keys <= query
    if pattern.sliding_window is not None:
        row &= query - keys < pattern.sliding_window
    if pattern.chunk_size is not None:
        row &= keys // pattern.chunk_size == query // pattern.chunk_size
    return row


def pattern_of_tensor(mask: Tensor) -> MaskPattern:
    """The pattern of a ready-made mask [..., T, T], boolean or additive; few tokens only show plain causality."""
    square = mask[0, 0] if mask.dim() == 4 else mask
    visible = square if square.dtype == torch.bool else square == 0
    hidden_value_ok = square.dtype == torch.bool or bool((square[~visible] <= -1e4).all())
    causal = torch.ones(visible.shape, dtype=torch.bool, device=visible.device).tril()
    if hidden_value_ok and visible.shape[-1] == visible.shape[-2] and torch.equal(visible, causal):
        return MaskPattern()
    return MaskPattern(problem="it adds biases to its attention scores, or masks them in a way of its own")


class MaskNotes:
    """Remembers the pattern behind every mask handed out while a model is traced."""

    def __init__(self, max_position: int) -> None:
        self._max_position = max_position
        self._patterns: dict[int, tuple[Tensor, MaskPattern]] = {}

    def make(self, arguments: dict[str, Any]) -> Tensor:
        """Build a boolean mask [1, 1, T, T] from the arguments of transformers' mask interface; note its pattern."""
        function = arguments["mask_function"]

        def allowed(queries: Tensor, keys: Tensor) -> Tensor:
            zero = torch.zeros(1, 1, dtype=torch.int64)
            return torch.as_tensor(function(zero, zero, queries, keys))

        length = int(arguments["kv_length"])
        with torch.device("cpu"):
            try:
                pattern = probe_pattern(allowed, self._max_position)
                positions = torch.arange(length)
                small = torch.broadcast_to(allowed(positions[:, None], positions[None, :]), (length, length)).clone()
            except (IndexError, RuntimeError, TypeError) as error:
                pattern = MaskPattern(problem=f"its mask function cannot be evaluated ({error})")
                small = torch.ones(length, length, dtype=torch.bool).tril()
        mask = small[None, None].to(arguments.get("device") or "cpu")
        self._patterns[mask.untyped_storage().data_ptr()] = (mask, pattern)
        return mask

    def pattern_of(self, mask: Any) -> MaskPattern | None:
        """The pattern of the mask an attention layer got; None when it got none."""
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor):
            return MaskPattern(problem=f"its attention takes a mask of type {type(mask).__name__}")
        noted = self._patterns.get(mask.untyped_storage().data_ptr())
        return noted[1] if noted is not None else pattern_of_tensor(mask)
