"""Where one request stands in its grammar, and what that means for its draft and its logits rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.grammar.interface import CompiledGrammar

ALL_TOKENS = np.int32(-1)
"""A word of a bitmask that allows each of its 32 tokens."""


def bitmask_width(vocab_size: int) -> int:
    """Words of 32 tokens."""
    return -(-vocab_size // 32)


def bitmask_of(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] with the bits of these tokens; ids outside the vocabulary are left out."""
    bits = np.zeros(bitmask_width(vocab_size) * 32, dtype=bool)
    bits[[token for token in token_ids if 0 <= token < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class RequestGrammar:
    """The grammar state of one request: at its last committed token, between calls.

    Draft tokens are only tried: every method that looks ahead takes its steps back before it returns.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        label: str = "grammar",
    ) -> None:
        """Begin at the beginning of an output.

        Args:
            compiled: the grammar.
            vocab_size: width of the logits.
            end_token_ids: the model's end tokens.
            ignore_eos: allow an end token only where the grammar allows nothing else.
            label: the grammar and its backend, for messages.
        """
        self._matcher = compiled.matcher()
        self._last_word = np.int32(-1) if vocab_size % 32 == 0 else np.int32((1 << vocab_size % 32) - 1)
        self._ends = bitmask_of(end_token_ids, vocab_size)
        self._ignore_eos = ignore_eos
        self._label = label
        self._masks: dict[tuple[int, ...], np.ndarray] = {}
        """Masks found since the last commit, by the draft tokens before them."""

    @property
    def is_terminated(self) -> bool:
        """Whether the committed output has ended."""
        return self._matcher.is_terminated()

    def advance(self, run: Sequence[int]) -> int:
        """Commit a run of tokens, up to the one that ends the output.

        Args:
            run: tokens, possibly with a code of `specdec.sampling.outcome` at the end.

        Returns:
            How many tokens count; fewer than ``run`` has when the output ended before the last one.

        Raises:
            RequestFailedError: the grammar refuses a token of the run.
        """
        self._masks.clear()
        for count, token in enumerate(run, start=1):
            if token < 0:
                break
            if not self._matcher.accept(token):
                raise RequestFailedError(f"token {token} is not one that the {self._label} allows here")
            if self._matcher.is_terminated():
                return count
        return len(run)

    def fitting(self, token_ids: Sequence[int], parents: Sequence[int] | None) -> list[bool]:
        """Which draft tokens the grammar allows, each after those on its path."""
        return self._walk(token_ids, parents, _nothing)

    def forced(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Tokens to draft behind ``token_ids``, all of which the grammar allows, because they can be foreseen.

        First tokens that are each the only one allowed; where several are allowed, what the matcher suggests.

        Returns:
            At most ``limit`` tokens, each allowed behind those before it.
        """
        accepted = 0
        found: list[int] = []
        try:
            for token in token_ids:
                if not self._matcher.accept(token):
                    return []
                accepted += 1
            while len(found) < limit and not self._matcher.is_terminated():
                only = _only_bit(self._mask((*token_ids, *found)))
                if only is None or not self._matcher.accept(only):
                    break
                accepted += 1
                found.append(only)
            if len(found) < limit and not self._matcher.is_terminated():
                for token in self._matcher.suggest(limit - len(found))[: limit - len(found)]:
                    if not self._matcher.accept(token):
                        break
                    accepted += 1
                    found.append(token)
            return found
        finally:
            self._take_back(accepted)

    def fill(self, token_ids: Sequence[int], parents: Sequence[int] | None, masks: np.ndarray) -> None:
        """Write the masks of a request's rows: the committed position, then one for each draft token.

        Rows that cannot be reached (behind a token that the grammar refuses, or behind the end) allow everything.

        Args:
            token_ids: the draft, N tokens or nodes.
            parents: for trees, as in `specdec.types.Draft`.
            masks: int32 [N + 1, ceil(V / 32)], written.
        """
        masks[:] = ALL_TOKENS

        def write(node: int) -> None:
            if not self._matcher.is_terminated():
                masks[node + 1] = self._mask(tuple(token_ids[: node + 1])) if parents is None else self._new_mask()

        self._walk(token_ids, parents, write)

    def only_ends(self, masks: np.ndarray) -> np.ndarray:
        """bool [rows]: whether a mask allows end tokens and nothing else."""
        return ~(masks & ~self._ends).any(axis=1)

    # --- looking ahead ------------------------------------------------------------------------------

    def _mask(self, path: tuple[int, ...]) -> np.ndarray:
        """The mask where the matcher stands, which is behind ``path``; found once."""
        mask = self._masks.get(path)
        if mask is None:
            mask = self._masks[path] = self._new_mask()
        return mask

    def _new_mask(self) -> np.ndarray:
        mask = np.empty((1, len(self._ends)), dtype=np.int32)
        self._matcher.fill_bitmask(mask, 0)
        mask[0, -1] &= self._last_word
        if self._ignore_eos and (mask & ~self._ends).any():
            mask &= ~self._ends
        return mask[0]

    def _walk(
        self, token_ids: Sequence[int], parents: Sequence[int] | None, visit: Callable[[int], None]
    ) -> list[bool]:
        """Go through a draft depth first; ``visit`` is called behind the committed position (-1) and allowed nodes."""
        reached = [False] * len(token_ids)
        visit(-1)
        if parents is None:
            accepted = 0
            try:
                for node, token in enumerate(token_ids):
                    if not self._matcher.accept(token):
                        break
                    accepted += 1
                    reached[node] = True
                    visit(node)
            finally:
                self._take_back(accepted)
            return reached
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._descend(-1, token_ids, children, visit, reached)
        return reached

    def _take_back(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def _descend(
        self,
        above: int,
        token_ids: Sequence[int],
        children: dict[int, list[int]],
        visit: Callable[[int], None],
        reached: list[bool],
    ) -> None:
        for node in children.get(above, ()):
            if self._matcher.accept(token_ids[node]):
                try:
                    reached[node] = True
                    visit(node)
                    self._descend(node, token_ids, children, visit, reached)
                finally:
                    self._matcher.rollback(1)


def _nothing(node: int) -> None:
    """Visit nothing."""


def _only_bit(mask: np.ndarray) -> int | None:
    """The one token that a mask allows, or None."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    token = int(words[0]) * 32 + bits.bit_length() - 1
    return token if bits & (bits - 1) == 0 else None
