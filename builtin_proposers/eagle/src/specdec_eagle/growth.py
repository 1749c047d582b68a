"""Growing trees with a head that attends.

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
        """See `specdec.drafting.trees.Growth`."""
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
