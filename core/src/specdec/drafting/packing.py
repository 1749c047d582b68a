"""From runs of tokens to packed batches for layers that share the target's block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from specdec.types import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.types import ComputedStep


@frozen(eq=False)
class Span:
    """Consecutive tokens of one request to run through the draft layers."""

    row: int
    """The request's row in the step's block tables."""
    start: int
    """Position of the first token."""
    token_ids: np.ndarray
    """int64 [n], n at least 1."""
    num_wanted: int = 0
    """Of how many of the last tokens the logits are wanted."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)


class SlotTable:
    """The block tables of a step's requests, on the host, for building batches over the same blocks."""

    def __init__(self, computed: ComputedStep, block_size: int, device: torch.device) -> None:
        """Copy the tables.

        Args:
            computed: the step.
            block_size: positions per block.
            device: where the batches go.
        """
        self._tables = computed.batch.block_tables.cpu().numpy()
        self._block_size = block_size
        self._device = device

    def blocks(self, row: int, count: int) -> np.ndarray:
        """int32 [count]: the first blocks of the request in a row."""
        return self._tables[row, :count]

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64: the slot of each position of the request in each row."""
        blocks = self._tables[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def batch_of_spans(self, spans: Sequence[Span]) -> PackedBatch:
        """One request per span; logits rows are the wanted last tokens of each, span after span."""
        lengths = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        rows = np.array([span.row for span in spans], dtype=np.int64)
        ends = np.cumsum(lengths)
        offsets = np.concatenate([[0], ends])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
        wanted = [np.arange(end - span.num_wanted, end) for span, end in zip(spans, ends.tolist(), strict=True)]
        return self._batch(
            np.concatenate([span.token_ids for span in spans]),
            positions,
            self.slots(np.repeat(rows, lengths), positions),
            offsets,
            starts + lengths,
            rows,
            np.concatenate(wanted),
        )

    def batch_of_tokens(self, token_ids: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> PackedBatch:
        """One token per request: int64 [A] ids (on the device), rows and positions; logits of all."""
        return self.chain_steps(rows, positions, 1).batch(0, token_ids)

    def chain_steps(self, rows: np.ndarray, starts: np.ndarray, count: int) -> ChainSteps:
        """Prepare to run one token per request, then the next, ``count`` times.

        Args:
            rows: int64 [A], the requests' rows.
            starts: int64 [A], the position of each request's first of these tokens.
            count: how many for each request; where a request's blocks end earlier, the steps beyond are meaningless.
        """
        positions = starts + np.arange(count)[:, None]
        last_block = self._tables.shape[1] - 1
        blocks = self._tables[rows, np.minimum(positions // self._block_size, last_block)].astype(np.int64)
        num_blocks = min(-(-int(positions.max() + 1) // self._block_size), last_block + 1)
        return ChainSteps(
            positions=self._tensor(positions),
            slots=self._tensor(blocks * self._block_size + positions % self._block_size),
            seq_lens=self._tensor((positions + 1).astype(np.int32)),
            block_tables=self._tensor(self._tables[rows, :num_blocks]),
            query_start_loc=self._tensor(np.arange(len(rows) + 1, dtype=np.int32)),
            indices=self._tensor(np.arange(len(rows))),
            longest=int(starts.max()) + 1,
        )

    def _batch(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        offsets: np.ndarray,
        seq_lens: np.ndarray,
        rows: np.ndarray,
        wanted: np.ndarray,
    ) -> PackedBatch:
        longest = int(seq_lens.max())
        tables = self._tables[rows, : -(-longest // self._block_size)]
        return PackedBatch(
            input_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            query_start_loc=self._tensor(offsets.astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(tables),
            logits_indices=self._tensor(wanted),
            max_query_len=int(np.diff(offsets).max()),
            max_seq_len=longest,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


@frozen(eq=False, kw_only=True)
class ChainSteps:
    """What the batches of a chain have before their tokens are known: A requests, K steps of one token each."""

    positions: torch.Tensor
    """int64 [K, A]."""
    slots: torch.Tensor
    """int64 [K, A]."""
    seq_lens: torch.Tensor
    """int32 [K, A]."""
    block_tables: torch.Tensor
    """int32 [A, blocks]."""
    query_start_loc: torch.Tensor
    """int32 [A + 1]."""
    indices: torch.Tensor
    """int64 [A]: 0, 1, …"""
    longest: int
    """The longest context of the first step."""

    def batch(self, step: int, token_ids: torch.Tensor) -> PackedBatch:
        """The batch of a step, with int64 [A] ids; logits of all."""
        return PackedBatch(
            input_ids=token_ids,
            positions=self.positions[step],
            slot_mapping=self.slots[step],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens[step],
            block_tables=self.block_tables,
            logits_indices=self.indices,
            max_query_len=1,
            max_seq_len=self.longest + step,
        )
