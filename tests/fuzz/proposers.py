"""Proposers of the fuzz that no package has."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from specdec.drafting import Proposer
from specdec.testing import OracleProposer
from specdec.types import Draft, ProposerCapabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec.types import ProposalInput


class TreeOracle(Proposer):
    """Draft trees in which the right path lies hidden among wrong branches."""

    capabilities = ProposerCapabilities(trees=True)

    def __init__(self, runs: Iterable[Sequence[int]], *, vocab_size: int, seed: int) -> None:
        """Know the outputs.

        Args:
            runs: prompt and output in one list each.
            vocab_size: the target's.
            seed: of the branches.
        """
        self._oracle = OracleProposer(runs, vocab_size=vocab_size)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._oracle.finish(request_id)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        trees = []
        for name, text, limit in zip(batch.request_ids, batch.token_ids, batch.max_draft_tokens.tolist(), strict=True):
            right = self._oracle.draft_for(name, text, self._random.randint(0, limit)) if limit else []
            trees.append(self._tree(list(right), limit))
        return Draft(
            token_ids=torch.tensor([token for tree in trees for token, _ in tree], dtype=torch.int64),
            num_draft_tokens=torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
            parents=torch.tensor([parent for tree in trees for _, parent in tree], dtype=torch.int32),
        )

    def _tree(self, right: list[int], limit: int) -> list[tuple[int, int]]:
        """(token, parent) of up to ``limit`` nodes; siblings differ."""
        nodes: list[tuple[int, int]] = []
        newest = -1
        """The last node on the right path."""
        for _ in range(4 * limit):
            if len(nodes) == limit or self._random.random() < 0.03:
                break
            if right and self._random.random() < 0.5:
                node = (right[0], newest)
                newest, right = len(nodes), right[1:]
            else:
                parent = self._random.randint(-1, len(nodes) - 1)
                node = (self._random.randrange(self._vocab_size), parent)
                if right and node == (right[0], newest):
                    continue  # the right path gets it in its own time
            if node in nodes:
                break
            nodes.append(node)
        return nodes
