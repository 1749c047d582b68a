"""Draft trees: the same shape for every draft, or grown where the draft is sure (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from specdec.drafting.token_trees import in_order
from specdec.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specdec.drafting.token_trees import Path, TreeOptions


class Growth(Protocol):
    """The trees of A requests while they grow by the same number of nodes."""

    @property
    def num_nodes(self) -> int:
        """Nodes run so far, of each request."""

    def root_logits(self) -> Tensor:
        """[A, draft vocabulary]: of the token behind the text."""

    def run(self, token_ids: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Run a level's nodes.

        Args:
            token_ids: int64 [A, m], in target ids.
            parents: int64 [A, m], indices among the nodes run so far, -1 for the root.
            depth: of the nodes; children of the root have 1.

        Returns:
            [A, m, draft vocabulary]: logits of the tokens behind them.
        """

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids."""


class TreeShape(ABC):
    """How trees grow."""

    @abstractmethod
    def num_rows(self, limit: int) -> int:
        """How many nodes are run for a draft of up to ``limit`` nodes."""

    @abstractmethod
    def grow(self, growth: Growth, limit: int, room: int | None = None) -> tuple[Tensor, Tensor]:
        """Grow trees.

        Args:
            growth: at their roots.
            limit: nodes of a tree.
            room: nodes that may be run; None: as many as needed.

        Returns:
            int64 [A, n] token ids and int64 [A, n] parents (-1: the root), parents before children.
        """


class StaticShape(TreeShape):
    """A tree given by the ranks of its tokens among the children of their parents."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Order the nodes.

        Args:
            paths: of all nodes; complete and without gaps (`specdec.drafting.token_trees.is_tree`).
        """
        self._paths = in_order(paths)

    def num_rows(self, limit: int) -> int:
        """Those that have children."""
        return len({path[:-1] for path in self._paths[:limit]} - {()})

    def grow(self, growth: Growth, limit: int, room: int | None = None) -> tuple[Tensor, Tensor]:
        """See `TreeShape.grow`; the tree is cut to its first ``limit`` nodes, of which fewer than that are run."""
        paths = self._paths[:limit]
        logits = growth.root_logits()[:, None]
        tokens: dict[Path, Tensor] = {}
        run_index: dict[Path, int] = {(): -1}
        level: list[Path] = [()]
        for depth in range(1, len(paths[-1]) + 1):
            children = [path for path in paths if len(path) == depth]
            ranked = growth.to_target_ids(logits.topk(1 + max(path[-1] for path in children)).indices)
            place = {path: i for i, path in enumerate(level)}
            tokens |= {path: ranked[:, place[path[:-1]], path[-1]] for path in children}
            level = [path for path in children if any(other[:-1] == path for other in paths)]
            if not level:
                break
            parents = _column([run_index[path[:-1]] for path in level], logits)
            run_index |= {path: growth.num_nodes + i for i, path in enumerate(level)}
            logits = growth.run(torch.stack([tokens[path] for path in level], dim=1), parents, depth)
        index: dict[Path, int] = {path: i for i, path in enumerate(paths)} | {(): -1}
        token_ids = torch.stack([tokens[path] for path in paths], dim=1)
        return token_ids, _column([index[path[:-1]] for path in paths], token_ids)


def _column(values: Sequence[int], like: Tensor) -> Tensor:
    """int64 [A, n]: the same values for each of the A requests of ``like``."""
    return torch.tensor(values, device=like.device).expand(like.shape[0], -1)


class DynamicShape(TreeShape):
    """EAGLE-2: of each level the most probable nodes are expanded, of all candidates the most probable are kept.

    A candidate's score is the sum of the log-probabilities along its path. It never exceeds its parent's, so the best
    candidates, ties going to the earlier one, form a tree.
    """

    def __init__(self, top_k: int, depth: int) -> None:
        """Choose the size.

        Args:
            top_k: children per expanded node, and nodes expanded of a level.
            depth: levels.
        """
        self._top_k, self._depth = top_k, depth

    def num_rows(self, limit: int) -> int:
        """``top_k`` of all levels but the last."""
        return self._top_k * (min(self._depth, limit) - 1)

    def grow(self, growth: Growth, limit: int, room: int | None = None) -> tuple[Tensor, Tensor]:
        """See `TreeShape.grow`."""
        law = growth.root_logits().float().log_softmax(dim=-1)
        k = min(self._top_k, law.shape[-1])
        scores, children = law.topk(k)
        frontier = torch.arange(k, device=law.device).expand_as(children)  # indices among all candidates
        run_parents = torch.full_like(children, -1)  # indices among the nodes run
        all_tokens, all_scores, all_parents = [children], [scores], [run_parents]
        tokens, count = children, k
        levels = min(self._depth, limit) if room is None else min(self._depth, limit, room // k + 1)
        for depth in range(1, levels):
            logits = growth.run(growth.to_target_ids(tokens), run_parents, depth)
            law, below = logits.float().log_softmax(dim=-1).topk(k)  # [A, k, k]
            children, candidates = below.flatten(1), (scores[..., None] + law).flatten(1)
            all_tokens.append(children)
            all_scores.append(candidates)
            all_parents.append(frontier.repeat_interleave(k, dim=1))
            scores, best = candidates.topk(k)
            tokens, frontier = children.gather(1, best), count + best
            run_parents = (growth.num_nodes - k) + best // k
            count += k * k
        kept = _best(torch.cat(all_scores, dim=1), limit)
        parents = torch.cat(all_parents, dim=1).gather(1, kept)
        places = torch.searchsorted(kept, parents.clamp(min=0))
        token_ids = growth.to_target_ids(torch.cat(all_tokens, dim=1).gather(1, kept))
        return token_ids, torch.where(parents < 0, parents, places)


def _best(scores: Tensor, count: int) -> Tensor:
    """int64 [A, n], ascending: the ``count`` highest of each row; ties go to the first."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def shape_of(options: TreeOptions) -> TreeShape | None:
    """The shape that options ask for; None for chains."""
    if options.static_tree is not None:
        return StaticShape(options.static_tree)
    return None if options.tree_top_k is None else DynamicShape(options.tree_top_k, options.tree_depth)


def no_drafts(num_requests: int) -> Draft:
    """No draft token for any of B requests."""
    return Draft(
        token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(num_requests, dtype=torch.int32)
    )


def draft_trees(limits: np.ndarray, grow: Callable[[np.ndarray, int], tuple[Tensor, Tensor]]) -> Draft:
    """Draft trees for B requests; those with the same limit grow together.

    Args:
        limits: int64 [B], the most nodes of each tree.
        grow: gets int64 [A], ascending, which requests, and their limit; returns as `TreeShape.grow`.
    """
    none = torch.empty(0, dtype=torch.int64)
    token_ids, parents = [none] * len(limits), [none] * len(limits)
    for limit in np.unique(limits[limits > 0]).tolist():
        members = np.flatnonzero(limits == limit)
        tokens, above = grow(members, limit)
        for i, member in enumerate(members.tolist()):
            token_ids[member], parents[member] = tokens[i].cpu(), above[i].cpu()
    return Draft(
        token_ids=torch.cat([*token_ids, none]),
        num_draft_tokens=torch.tensor([len(tokens) for tokens in token_ids], dtype=torch.int32),
        parents=torch.cat([*parents, none]).int(),
    )
