"""Draft trees: the same shape for every draft, or grown where the draft is sure (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from attrs import frozen

from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.drafting.token_trees import in_order
from specdec.types import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from specdec.drafting.token_trees import Path, TreeOptions
    from specdec.types import ProposalInput


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


@frozen(eq=False)
class Keys:
    """What the nodes of the trees of A requests are drawn with."""

    temperature: Tensor
    """float32 [A], 0 for greedy requests."""
    seeds: Tensor
    """int64 [A]."""
    positions: Tensor
    """int64 [A]: the position in its sequence of a request's first draft token."""

    @classmethod
    def of(cls, batch: ProposalInput, members: np.ndarray) -> Keys:
        """Those of some requests of a proposal, int64 [A]; on the CPU."""
        rows = torch.from_numpy(members)
        temperature, seeds = sampling_tensors(batch)
        ends = torch.tensor([len(batch.token_ids[member]) for member in members.tolist()], dtype=torch.int64)
        return cls(temperature[rows], seeds[rows], ends)


@frozen(eq=False)
class Vocabulary:
    """What the logits of a draft mean."""

    size: int
    """V, the width of the target's logits."""
    to_target_ids: Callable[[Tensor], Tensor] | None = None
    """Maps int64 draft-vocabulary ids to target ids. None: they are the same, and logits beyond ``size`` are
    padding."""

    def cut(self, logits: Tensor) -> Tensor:
        """Logits, [..., draft vocabulary], without padding."""
        return logits[..., : self.size] if self.to_target_ids is None else logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target."""
        return draft_ids if self.to_target_ids is None else self.to_target_ids(draft_ids)


@frozen(eq=False)
class Trees:
    """Trees of A requests with n nodes each, parents before children."""

    token_ids: Tensor
    """int64 [A, n], target ids."""
    parents: Tensor
    """int64 [A, n], -1: the root."""
    probs: Tensor | None = None
    """float32 [A, n, V]: the law that each node was drawn from, given its earlier siblings; None for one-hot laws."""


class TreeShape(ABC):
    """How trees grow."""

    @abstractmethod
    def num_rows(self, limit: int) -> int:
        """How many nodes are run for a draft of up to ``limit`` nodes."""

    @abstractmethod
    def grow(self, growth: Growth, limit: int, keys: Keys, room: int | None = None) -> Trees:
        """Grow trees.

        Args:
            growth: at their roots.
            limit: nodes of a tree.
            keys: for shapes whose nodes are drawn.
            room: nodes that may be run; None: as many as needed.
        """


class StaticShape(TreeShape):
    """A tree given by the ranks of its tokens among the children of their parents.

    With draws in place of the likeliest tokens, the ranks are the order in which the children of a node were drawn.
    """

    def __init__(self, paths: Sequence[Path], sampler: DraftSampler, vocabulary: Vocabulary) -> None:
        """Order the nodes.

        Args:
            paths: of all nodes; complete and without gaps (`specdec.drafting.token_trees.is_tree`).
            sampler: picks the children of nodes.
            vocabulary: of the draft.
        """
        self._paths = in_order(paths)
        self._sampler = sampler
        self._vocabulary = vocabulary

    def num_rows(self, limit: int) -> int:
        """Those that have children."""
        return len({path[:-1] for path in self._paths[:limit]} - {()})

    def grow(self, growth: Growth, limit: int, keys: Keys, room: int | None = None) -> Trees:
        """See `TreeShape.grow`; the tree is cut to its first ``limit`` nodes, of which fewer than that are run."""
        paths = self._paths[:limit]
        logits = growth.root_logits()[:, None]
        tokens: dict[Path, Tensor] = {}
        laws: dict[Path, Tensor] = {}
        run_index: dict[Path, int] = {(): -1}
        level: list[Path] = [()]
        for depth in range(1, len(paths[-1]) + 1):
            children = [path for path in paths if len(path) == depth]
            ranked, drawn_from = self._children(logits, 1 + max(path[-1] for path in children), keys, depth)
            place = {path: i for i, path in enumerate(level)}
            tokens |= {path: ranked[:, place[path[:-1]], path[-1]] for path in children}
            if drawn_from is not None:
                laws |= {path: drawn_from[:, place[path[:-1]], path[-1]] for path in children}
            level = [path for path in children if any(other[:-1] == path for other in paths)]
            if not level:
                break
            parents = _column([run_index[path[:-1]] for path in level], logits)
            run_index |= {path: growth.num_nodes + i for i, path in enumerate(level)}
            logits = growth.run(torch.stack([tokens[path] for path in level], dim=1), parents, depth)
        index: dict[Path, int] = {path: i for i, path in enumerate(paths)} | {(): -1}
        token_ids = torch.stack([tokens[path] for path in paths], dim=1)
        probs = torch.stack([laws[path] for path in paths], dim=1) if laws else None
        return Trees(token_ids, _column([index[path[:-1]] for path in paths], token_ids), probs)

    def _children(self, logits: Tensor, count: int, keys: Keys, depth: int) -> tuple[Tensor, Tensor | None]:
        """Of logits [A, m, draft vocabulary], int64 [A, m, count] and float32 [A, m, count, V]; see `DraftSampler`."""
        shape = logits.shape[:2]

        def each(values: Tensor) -> Tensor:
            return values.to(logits.device).repeat_interleave(shape[1])

        tokens, laws = self._sampler.choose_children(
            logits.flatten(0, 1),
            each(keys.temperature),
            each(keys.seeds),
            each(keys.positions) + (depth - 1),
            count,
            self._vocabulary.to_target_ids,
            draft_position=depth - 1,
            vocab_size=self._vocabulary.size,
        )
        return tokens.unflatten(0, shape), None if laws is None else laws.unflatten(0, shape)


def _column(values: Sequence[int], like: Tensor) -> Tensor:
    """int64 [A, n]: the same values for each of the A requests of ``like``."""
    return torch.tensor(values, device=like.device).expand(like.shape[0], -1)


class DynamicShape(TreeShape):
    """EAGLE-2: of each level the most probable nodes are expanded, of all candidates the most probable are kept.

    A candidate's score is the sum of the log-probabilities along its path. It never exceeds its parent's, so the best
    candidates, ties going to the earlier one, form a tree.
    """

    def __init__(self, top_k: int, depth: int, vocabulary: Vocabulary) -> None:
        """Choose the size.

        Args:
            top_k: children per expanded node, and nodes expanded of a level.
            depth: levels.
            vocabulary: of the draft.
        """
        self._top_k, self._depth = top_k, depth
        self._vocabulary = vocabulary

    def num_rows(self, limit: int) -> int:
        """``top_k`` of all levels but the last."""
        return self._top_k * (min(self._depth, limit) - 1)

    def grow(self, growth: Growth, limit: int, keys: Keys, room: int | None = None) -> Trees:
        """See `TreeShape.grow`; nothing is drawn."""
        law = self._vocabulary.cut(growth.root_logits()).float().log_softmax(dim=-1)
        k = min(self._top_k, law.shape[-1])
        scores, children = law.topk(k)
        frontier = torch.arange(k, device=law.device).expand_as(children)  # indices among all candidates
        run_parents = torch.full_like(children, -1)  # indices among the nodes run
        all_tokens, all_scores, all_parents = [children], [scores], [run_parents]
        tokens, count = children, k
        levels = min(self._depth, limit) if room is None else min(self._depth, limit, room // k + 1)
        for depth in range(1, levels):
            logits = growth.run(self._vocabulary.target_ids(tokens), run_parents, depth)
            law, below = self._vocabulary.cut(logits).float().log_softmax(dim=-1).topk(k)  # [A, k, k]
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
        token_ids = self._vocabulary.target_ids(torch.cat(all_tokens, dim=1).gather(1, kept))
        return Trees(token_ids, torch.where(parents < 0, parents, places))


def _best(scores: Tensor, count: int) -> Tensor:
    """int64 [A, n], ascending: the ``count`` highest of each row; ties go to the first."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def shape_of(options: TreeOptions, vocabulary: Vocabulary) -> TreeShape | None:
    """The shape that options ask for; None for chains."""
    if options.static_tree is not None:
        return StaticShape(options.static_tree, DraftSampler(options.draft_sample_method), vocabulary)
    return None if options.tree_top_k is None else DynamicShape(options.tree_top_k, options.tree_depth, vocabulary)


def no_drafts(num_requests: int) -> Draft:
    """No draft token for any of B requests."""
    return Draft(
        token_ids=torch.empty(0, dtype=torch.int64), num_draft_tokens=torch.zeros(num_requests, dtype=torch.int32)
    )


def draft_trees(limits: np.ndarray, grow: Callable[[np.ndarray, int], Trees]) -> Draft:
    """Draft trees for B requests; those with the same limit grow together.

    Args:
        limits: int64 [B], the most nodes of each tree.
        grow: gets int64 [A], ascending, which requests, and their limit.
    """
    none = torch.empty(0, dtype=torch.int64)
    token_ids, parents = [none] * len(limits), [none] * len(limits)
    laws: dict[int, Tensor] = {}
    for limit in np.unique(limits[limits > 0]).tolist():
        members = np.flatnonzero(limits == limit)
        trees = grow(members, limit)
        for i, member in enumerate(members.tolist()):
            token_ids[member], parents[member] = trees.token_ids[i].cpu(), trees.parents[i].cpu()
            if trees.probs is not None:
                laws[member] = trees.probs[i].cpu()
    return Draft(
        token_ids=torch.cat([*token_ids, none]),
        num_draft_tokens=torch.tensor([len(tokens) for tokens in token_ids], dtype=torch.int32),
        parents=torch.cat([*parents, none]).int(),
        draft_probs=_packed_laws(laws, token_ids) if laws else None,
    )


def _packed_laws(laws: dict[int, Tensor], token_ids: Sequence[Tensor]) -> Tensor:
    """float32 [N, V]: the laws of all requests' nodes; one-hot for requests that have none."""
    like = next(iter(laws.values()))
    rows = []
    for member, tokens in enumerate(token_ids):
        law = laws.get(member)
        if law is None:
            law = like.new_zeros(len(tokens), like.shape[1]).scatter_(1, tokens[:, None], 1.0)
        rows.append(law)
    return torch.cat(rows)
