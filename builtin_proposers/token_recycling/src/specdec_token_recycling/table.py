"""What the target found likeliest behind each token, and behind each pair, the last time that it computed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.cpu.library import Kernels
from specdec.drafting.token_trees import in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting.token_trees import Path

NOTHING = -1
"""In place of a token or pair that is not known."""
NUM_PAIRS = 1 << 17
"""How many pairs are known at most: some hundred answers' worth."""
KERNELS = Kernels("specdec_token_recycling.rows")


class SuccessorTable:
    """For each token the few that are likeliest behind it, the likeliest first, as in the paper; for pairs as well."""

    def __init__(self, vocab_size: int, width: int) -> None:
        """Know nothing.

        Args:
            vocab_size: ids lie below it.
            width: how many tokens are kept for each (M).
        """
        self._successors = np.full((vocab_size + NUM_PAIRS, width), NOTHING, dtype=np.int32)
        self._pairs = np.full(NUM_PAIRS, NOTHING, dtype=np.int64)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The arguments ``successors`` and ``pairs`` of the kernels."""
        return self._successors, self._pairs

    @property
    def width(self) -> int:
        """How many tokens are kept for each."""
        return self._successors.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._successors.nbytes + self._pairs.nbytes

    def learn(self, before: np.ndarray, token_ids: np.ndarray, likeliest: np.ndarray) -> None:
        """Replace what is known of tokens, and of each behind the one before it; of equal ones the last counts.

        Args:
            before: int64 [R]: the tokens before them, negative where there is none.
            token_ids: int64 [R].
            likeliest: int64 [R, M], the likeliest first.
        """
        KERNELS.function("learn_rows")(*self.arrays, before, token_ids, likeliest)

    def learn_text(self, text: np.ndarray, start: int) -> None:
        """Put what follows the tokens of a text before what is known of them, and of each behind the one before it.

        Args:
            text: int64 [n].
            start: index of the first token of which to learn; the last has no follower.
        """
        KERNELS.function("learn_text")(*self.arrays, text, start)


class TreeReader:
    """Reads drafts of one shape off a table, for all requests in one call."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Order the nodes by depth, so that any number of the first of them is a tree.

        Args:
            paths: of all nodes; complete and without gaps (`specdec.drafting.token_trees.is_tree`).
        """
        ordered = in_order(paths)
        index = {path: node for node, path in enumerate(ordered)} | {(): -1}
        self._parents = np.array([index[path[:-1]] for path in ordered], dtype=np.int64)
        self._ranks = np.array([path[-1] for path in ordered], dtype=np.int64)

    @property
    def width(self) -> int:
        """How many successors of a token it asks for."""
        return int(self._ranks.max()) + 1

    def read(
        self, table: SuccessorTable, last_two: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The drafts of B requests: first what is known behind the last two tokens, or else behind the last one, then
        what is known behind pairs. Nodes for which the table has no token are left out, with those behind them.

        Args:
            table: at least as wide as this.
            last_two: int64 [B, 2]: the last tokens of each text; the first is negative where there is one alone.
            limits: int32 [B]: the most nodes of each draft.

        Returns:
            int64 [N] tokens and int32 [N] parents as in `specdec.types.Draft`, and int32 [B] numbers of nodes.
        """
        size = len(last_two) * len(self._ranks)
        token_ids, parents = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int32)
        counts = np.empty(len(last_two), dtype=np.int32)
        shape = (self._parents, self._ranks)
        read_drafts = KERNELS.function("read_drafts")
        total = read_drafts(*table.arrays, *shape, last_two, limits, token_ids, parents, counts)
        return token_ids[:total], parents[:total], counts
