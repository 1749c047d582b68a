"""Growing trees with a head that attends.

A node is run through the head with its own token, the output of its parent and the position of its parent (rows carry
the token behind them). Each pass runs one level; who sees whom of the levels before, whose K/V is cached, the batch
says (`specdec.types.PackedBatch.cached_parents`)::

    pass 1   a b            children of the text's last row; seen: the text, each itself
    pass 2       | c d      c below a, d below b: c sees the text, a and itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.types import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.drafting import DraftHead
    from specdec.drafting.kit import DraftLayers, SlotTable


class HeadGrowth:
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
        self._parents = hidden.new_empty(len(rows), 0, dtype=torch.int64)  # [A, F]

    @property
    def num_nodes(self) -> int:
        """Nodes run so far, of each request (F)."""
        return self._parents.shape[1]

    def root_logits(self) -> Tensor:
        """[A, draft vocabulary]: of the token behind the text."""
        return self._head.logits(self._outputs[:, 0])

    def run(self, token_ids: Tensor, parents: Tensor, depth: int) -> Tensor:
        """See `specdec.drafting.trees.Growth`; only the level's nodes run, over the K/V of those before."""
        packed = self._batch(token_ids, parents, depth)
        width = self._outputs.shape[-1]
        features = self._outputs.gather(1, (parents + 1)[..., None].expand(-1, -1, width))
        with self._layers.attending(packed):
            outputs = self._head.forward(packed.input_ids, features.flatten(0, 1), packed.positions, depth)
        self._outputs = torch.cat([self._outputs, outputs.view(*token_ids.shape, width)], dim=1)
        self._parents = torch.cat([self._parents, parents], dim=1)
        return self._head.logits(outputs).unflatten(0, token_ids.shape)

    def _batch(self, token_ids: Tensor, parents: Tensor, depth: int) -> PackedBatch:
        """A level's nodes of all requests; a node's slot counts on from the text, its position is that of its depth."""
        device, count, before = token_ids.device, token_ids.shape[1], self.num_nodes
        positions = np.repeat(self._ends + depth - 1, count)
        places = self._ends[:, None] + np.arange(before, before + count)
        slots = self._tables.slots(np.repeat(self._rows, count), places.ravel())
        longest = int(places.max()) + 1
        blocks = np.stack(
            [self._tables.blocks(row, -(-longest // self._layers.cache.block_size)) for row in self._rows]
        )

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return PackedBatch(
            input_ids=token_ids.flatten(),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            query_start_loc=tensor(np.arange(0, len(self._rows) * count + 1, count, dtype=np.int32)),
            seq_lens=tensor((self._ends + before + count).astype(np.int32)),
            block_tables=tensor(blocks),
            logits_indices=torch.empty(0, dtype=torch.int64, device=device),
            max_query_len=count,
            max_seq_len=longest,
            parents=parents.flatten().int(),
            cached_parents=self._parents.int() if before else None,
        )
