"""Draft trees: the same shape for every draft, or grown where the head is sure (EAGLE-2, Li et al. 2024).

A node is run through the head with its own token, the output of its parent and the position of its parent (rows carry
the token behind them). Each pass runs all nodes of the trees so far, of which only the last level is new: that way who
sees whom is a tree within one batch, which every attention backend that serves trees can do::

    pass 1   a b            children of the text's last row; seen: the text, each itself
    pass 2   a b | c d      c below a, d below b; a and b give what they gave before
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.types import Draft, PackedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.drafting import DraftHead
    from specdec.drafting.kit import DraftLayers, SlotTable


class Growth:
    """The trees of A requests while they grow by the same number of nodes."""

    def __init__(
        self,
        head: DraftHead,
        layers: DraftLayers,
        tables: SlotTable,
        rows: np.ndarray,
        ends: np.ndarray,
        hidden: Tensor,
    ) -> None:
        """Start with the root.

        Args:
            head: runs the nodes.
            layers: its K/V.
            tables: the step's slots.
            rows: int64 [A], the requests' rows in the step.
            ends: int64 [A], positions that are computed.
            hidden: [A, h], the head's output at the last of them.
        """
        self._head, self._layers, self._tables = head, layers, tables
        self._rows, self._ends = rows, ends
        self._outputs = hidden[:, None]  # [A, 1 + F, h], the root first
        self._token_ids = hidden.new_empty(len(rows), 0, dtype=torch.int64)
        self._parents = self._token_ids
        self._depths: list[int] = []

    @property
    def num_nodes(self) -> int:
        """Nodes run so far, of each request (F)."""
        return len(self._depths)

    def root_logits(self) -> Tensor:
        """[A, draft vocabulary]: of the token behind the text."""
        return self._head.logits(self._outputs[:, 0])

    def run(self, token_ids: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Run a level's nodes.

        Args:
            token_ids: int64 [A, m], in target ids.
            parents: int64 [A, m], indices among the nodes run so far, -1 for the root.
            depth: of the nodes; children of the root have 1.

        Returns:
            [A, m, draft vocabulary]: logits of the tokens behind them.
        """
        count = token_ids.shape[1]
        self._token_ids = torch.cat([self._token_ids, token_ids], dim=1)
        self._parents = torch.cat([self._parents, parents], dim=1)
        self._depths += [depth] * count
        width = self._outputs.shape[-1]
        features = self._outputs.gather(1, (self._parents + 1)[..., None].expand(-1, -1, width))
        packed = self._batch()
        with self._layers.attending(packed):
            outputs = self._head.forward(packed.input_ids, features.flatten(0, 1), packed.positions, depth)
        new = outputs.view(len(self._rows), -1, width)[:, -count:]
        self._outputs = torch.cat([self._outputs, new], dim=1)
        return self._head.logits(new.flatten(0, 1)).unflatten(0, (len(self._rows), count))

    def _batch(self) -> PackedBatch:
        """All nodes of all requests; a node's slot counts on from the text, its position is that of its depth."""
        device, count = self._token_ids.device, self.num_nodes
        positions = self._ends[:, None] + np.array(self._depths) - 1
        places = self._ends[:, None] + np.arange(count)
        slots = self._tables.slots(np.repeat(self._rows, count), places.ravel())
        longest = int(places.max()) + 1
        blocks = np.stack(
            [self._tables.blocks(row, -(-longest // self._layers.cache.block_size)) for row in self._rows]
        )

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return PackedBatch(
            input_ids=self._token_ids.flatten(),
            positions=tensor(positions.ravel()),
            slot_mapping=tensor(slots),
            query_start_loc=tensor(np.arange(0, len(self._rows) * count + 1, count, dtype=np.int32)),
            seq_lens=tensor((self._ends + count).astype(np.int32)),
            block_tables=tensor(blocks),
            logits_indices=torch.empty(0, dtype=torch.int64, device=device),
            max_query_len=count,
            max_seq_len=longest,
            parents=self._parents.flatten().int(),
        )


class StaticShape:
    """A tree given by the ranks of its tokens among the children of their parents."""

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Order the nodes: by depth, then by rank.

        Args:
            paths: of all nodes; complete and without gaps (`specdec_eagle.config`).
        """
        self._paths = sorted(paths, key=lambda path: (len(path), path))

    def num_rows(self, limit: int) -> int:
        """How many nodes are run for a draft of up to ``limit`` nodes: those with children."""
        return len({path[:-1] for path in self._paths[:limit]} - {()})

    def grow(self, growth: Growth, head: DraftHead, limit: int, room: int) -> tuple[Tensor, Tensor]:
        """See `DynamicShape.grow`; the tree is cut to its first ``limit`` nodes."""
        paths = self._paths[:limit]
        logits = growth.root_logits()[:, None]
        tokens: dict[tuple[int, ...], Tensor] = {}
        run_index: dict[tuple[int, ...], int] = {(): -1}
        level: list[tuple[int, ...]] = [()]
        for depth in range(1, len(paths[-1]) + 1):
            widest = 1 + max(path[-1] for path in paths if len(path) == depth)
            ranked = head.to_target_ids(
                logits.topk(min(widest, logits.shape[-1]), dim=-1).indices
            )  # [A, level, widest]
            for i, parent in enumerate(level):
                tokens |= {(*parent, rank): ranked[:, i, rank] for rank in range(widest) if (*parent, rank) in paths}
            level = [path for path in paths if len(path) == depth and any(other[:-1] == path for other in paths)]
            if not level:
                break
            parents = torch.tensor([run_index[path[:-1]] for path in level], device=logits.device)
            run_index |= {path: growth.num_nodes + i for i, path in enumerate(level)}
            chosen = torch.stack([tokens[path] for path in level], dim=1)
            logits = growth.run(chosen, parents.expand(len(chosen), -1), depth)
        token_ids = torch.stack([tokens[path] for path in paths], dim=1)
        index = {path: i for i, path in enumerate(paths)} | {(): -1}
        parents = torch.tensor([index[path[:-1]] for path in paths], device=token_ids.device)
        return token_ids, parents.expand(len(token_ids), -1)


class DynamicShape:
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
        """How many nodes are run for a draft of up to ``limit`` nodes: all levels but the last."""
        return self._top_k * (min(self._depth, limit) - 1)

    def grow(self, growth: Growth, head: DraftHead, limit: int, room: int) -> tuple[Tensor, Tensor]:
        """Grow trees.

        Args:
            growth: at their roots.
            head: gives the target ids of its vocabulary.
            limit: nodes of a tree.
            room: positions behind the text that may be written.

        Returns:
            int64 [A, n] token ids and int64 [A, n] parents (-1: the root), parents before children.
        """
        scores, children = (
            growth.root_logits().float().log_softmax(dim=-1).topk(min(self._top_k, head.draft_vocab_size))
        )
        k = scores.shape[1]
        frontier = torch.arange(k, device=scores.device).expand_as(children)  # indices among all candidates
        run_parents = torch.full_like(frontier, -1)  # indices among the nodes run
        all_tokens, all_scores, all_parents = [children], [scores], [run_parents]
        count, tokens = k, children
        for depth in range(1, min(self._depth, limit, room // k + 1)):
            logits = growth.run(head.to_target_ids(tokens), run_parents, depth)
            law, children = logits.float().log_softmax(dim=-1).topk(k)  # [A, k, k]
            candidates = (scores[..., None] + law).flatten(1)
            all_tokens.append(children.flatten(1))
            all_scores.append(candidates)
            all_parents.append(frontier.repeat_interleave(k, dim=1))
            scores, best = candidates.topk(k)
            tokens = children.flatten(1).gather(1, best)
            frontier = count + best
            run_parents = (growth.num_nodes - k) + best // k
            count += k * k
        tokens, parents = torch.cat(all_tokens, dim=1), torch.cat(all_parents, dim=1)
        order = torch.cat(all_scores, dim=1).sort(dim=1, descending=True, stable=True).indices
        kept = order[:, :limit].sort(dim=1).values
        parents = parents.gather(1, kept)
        places = torch.searchsorted(kept, parents.clamp(min=0).contiguous())
        return head.to_target_ids(tokens.gather(1, kept)), torch.where(parents < 0, parents, places)


class TreeDrafter:
    """Drafts trees for the requests of a step."""

    def __init__(
        self, shape: StaticShape | DynamicShape, head: DraftHead, layers: DraftLayers, *, max_positions: int
    ) -> None:
        """Hold what is the same for all steps.

        Args:
            shape: how trees grow.
            head: runs the nodes.
            layers: its K/V.
            max_positions: positions that exist; nothing is written behind them.
        """
        self._shape, self._head, self._layers = shape, head, layers
        self._max_positions = max_positions

    def draft(self, hidden: Tensor, tables: SlotTable, rows: np.ndarray, ends: np.ndarray, limits: np.ndarray) -> Draft:
        """Draft for B requests.

        Args:
            hidden: [A, h], the head's output at the last computed position of those with a limit above 0.
            tables: the step's slots.
            rows: int64 [B], the requests' rows in the step.
            ends: int64 [B], positions that are computed.
            limits: int64 [B], the most nodes of each tree.
        """
        token_ids: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(rows)
        parents: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(rows)
        drafting = np.flatnonzero(limits > 0)
        for limit in np.unique(limits[drafting]).tolist():  # requests with the same limit grow together
            group = limits[drafting] == limit
            members = drafting[group]
            chosen = torch.from_numpy(np.flatnonzero(group)).to(hidden.device)
            growth = Growth(
                self._head, self._layers, tables, rows[members], ends[members], hidden.index_select(0, chosen)
            )
            room = self._max_positions - int(ends[members].max())
            tokens, above = self._shape.grow(growth, self._head, limit, room)
            for i, member in enumerate(members.tolist()):
                token_ids[member], parents[member] = tokens[i].cpu(), above[i].cpu()
        return Draft(
            token_ids=torch.cat([*token_ids, torch.empty(0, dtype=torch.int64)]),
            num_draft_tokens=torch.tensor([len(tokens) for tokens in token_ids], dtype=torch.int32),
            parents=torch.cat([*parents, torch.empty(0, dtype=torch.int64)]).int(),
        )
