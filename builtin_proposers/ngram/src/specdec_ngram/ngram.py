"""The n-gram proposer: drafts are what followed an earlier occurrence of the latest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.cpu.library import Kernels
from specdec.drafting import Proposer
from specdec.types import Draft
from specdec_ngram.layout import CAPACITY, NODE_WIDTH, NODES, NUM_COLUMNS, TABLE, num_slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.types import ProposalInput, RequestInfo

_MIN_CAPACITY = 64
_KERNELS = Kernels("specdec_ngram.index")


class NgramProposer(Proposer):
    """Prompt lookup (Saxena 2023; also LLMA, Yang et al. 2023, arXiv 2304.04487), incremental.

    The longest suffix of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens that occurred before is looked up in the
    request's own tokens. Of its occurrences the latest that has as many tokens after it as the request can use is
    copied; when none has that many, the earliest, which has most. Occurrences may overlap the suffix.

    The index of a request (`specdec_ngram.index`) is built at its first `propose` and extended by its new tokens at
    each later one, so that a step's cost does not depend on the length of the text. A text that is shorter than it was,
    or other than it was at the index's end, is indexed anew.
    """

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int, num_speculative_tokens: int) -> None:
        self._shortest = prompt_lookup_min
        self._longest = prompt_lookup_max
        self._k = num_speculative_tokens
        self._state = np.zeros((0, NUM_COLUMNS), dtype=np.int64)
        self._free: list[int] = []
        self._row_of: dict[str, int] = {}
        self._buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._last_ids: tuple[str, ...] = ()
        self._last_rows = np.zeros(0, dtype=np.int64)

    def load(self, target: Any) -> None:
        """Load what `propose` runs, so that no request waits for it."""
        _KERNELS.load()

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`; the prompt is indexed at the first `propose`."""
        self.finish(request.request_id)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        pointers, lengths = batch.token_buffers()
        token_ids, counts = self._propose(batch.request_ids, pointers, lengths, batch.max_draft_tokens)
        return Draft(token_ids=torch.from_numpy(token_ids), num_draft_tokens=torch.from_numpy(counts))

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            del self._buffers[row]
            self._state[row] = 0
            self._free.append(row)
            self._last_ids = ()

    def memory(self) -> Mapping[str, int]:
        """Bytes of the requests' indices."""
        return {"index": sum(table.nbytes + nodes.nbytes for table, nodes in self._buffers.values())}

    def _propose(
        self, request_ids: tuple[str, ...], pointers: Any, lengths: Any, limits: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(request_ids, lengths)
        # Copies, so that the compiled function always sees the same types: writable arrays of these dtypes.
        pointers, lengths = np.array(pointers, dtype=np.int64), np.array(lengths, dtype=np.int64)
        limits = np.array(limits, dtype=np.int32)
        token_ids = np.empty(len(rows) * self._k, dtype=np.int64)
        counts = np.empty(len(rows), dtype=np.int32)
        sizes = (self._k, self._shortest, self._longest)
        propose_all = _KERNELS.function("propose_all")
        while (total := propose_all(self._state, rows, pointers, lengths, limits, *sizes, token_ids, counts)) < 0:
            self._grow(rows[-1 - total])
        return token_ids[:total], counts

    def _rows(self, request_ids: tuple[str, ...], lengths: Any) -> np.ndarray:
        """Each request's row of the state; the answer is kept, because most steps serve the requests of the last."""
        if request_ids != self._last_ids:
            rows = [
                row if (row := self._row_of.get(request_id)) is not None else self._new_row(request_id, int(length))
                for request_id, length in zip(request_ids, lengths, strict=True)
            ]
            self._last_ids, self._last_rows = request_ids, np.array(rows, dtype=np.int64)
        return self._last_rows

    def _new_row(self, request_id: str, length: int) -> int:
        if not self._free:
            old = len(self._state)
            self._state = np.concatenate([self._state, np.zeros((max(old, 8), NUM_COLUMNS), dtype=np.int64)])
            self._free = list(range(len(self._state) - 1, old - 1, -1))
        row = self._row_of[request_id] = self._free.pop()
        self._set_buffers(row, _MIN_CAPACITY + length + length // 2)
        return row

    def _grow(self, row: int) -> None:
        """Make half as much room again for an index and move what is in it."""
        old_table, old_nodes = self._buffers[row]
        table, nodes = self._set_buffers(row, 3 * int(self._state[row, CAPACITY]) // 2)
        nodes[: len(old_nodes)] = old_nodes
        _KERNELS.function("move_table")(old_table, table)

    def _set_buffers(self, row: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        table = np.zeros(num_slots(capacity), dtype=np.int64)
        nodes = np.empty(NODE_WIDTH * capacity, dtype=np.int32)
        self._buffers[row] = table, nodes
        self._state[row, [TABLE, NODES, CAPACITY]] = table.ctypes.data, nodes.ctypes.data, capacity
        return table, nodes
