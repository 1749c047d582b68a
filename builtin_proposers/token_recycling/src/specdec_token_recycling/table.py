"""What the target found likeliest behind each token of the vocabulary, the last time that it computed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specdec.cpu.library import Kernels
from specdec.drafting.token_trees import in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting.token_trees import Path

NOTHING = -1
"""In place of a token that is not known."""
KERNELS = Kernels("specdec_token_recycling.reading")


class SuccessorTable:
    """The matrix of the paper: for each token the few that are likeliest behind it, the likeliest first."""

    def __init__(self, vocab_size: int, width: int) -> None:
        """Know nothing.

        Args:
            vocab_size: ids lie below it.
            width: how many tokens are kept for each (M).
        """
        self.successors = np.full((vocab_size, width), NOTHING, dtype=np.int32)
        """int32 [V, M], `NOTHING` where nothing is known."""

    @property
    def width(self) -> int:
        """How many tokens are kept for each."""
        return self.successors.shape[1]

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.successors.nbytes

    def learn(self, token_ids: np.ndarray, likeliest: np.ndarray) -> None:
        """Replace what is known of tokens; of equal tokens the last counts.

        Args:
            token_ids: int64 [R].
            likeliest: int64 [R, M], the likeliest first.
        """
        self.successors[token_ids] = likeliest

    def learn_followers(self, token_ids: np.ndarray, followers: np.ndarray) -> None:
        """Put what follows tokens in a text before what is known of them; of equal tokens the last counts.

        Args:
            token_ids: int64 [n].
            followers: int64 [n].
        """
        known = self.successors[token_ids]
        found = known == followers[:, None]
        moved_to = np.where(found.any(axis=1), found.argmax(axis=1), self.width - 1)
        moves = np.arange(1, self.width) <= moved_to[:, None]
        known[:, 1:] = np.where(moves, known[:, :-1], known[:, 1:])
        known[:, 0] = followers
        self.successors[token_ids] = known


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
        self, table: SuccessorTable, last_tokens: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The drafts of B requests. Nodes for which the table has no token are left out, with those behind them.

        Args:
            table: at least as wide as this.
            last_tokens: int64 [B]: the last token of each text.
            limits: int32 [B]: the most nodes of each draft.

        Returns:
            int64 [N] tokens and int32 [N] parents as in `specdec.types.Draft`, and int32 [B] numbers of nodes.
        """
        size = len(last_tokens) * len(self._ranks)
        token_ids, parents = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int32)
        counts = np.empty(len(last_tokens), dtype=np.int32)
        shape = (self._parents, self._ranks)
        read_drafts = KERNELS.function("read_drafts")
        total = read_drafts(table.successors, *shape, last_tokens, limits, token_ids, parents, counts)
        return token_ids[:total], parents[:total], counts
