"""The arrays behind a trie's row of integers."""

from __future__ import annotations

import numpy as np

from specdec.cpu.library import Kernels
from specdec_suffix import layout

KERNELS = Kernels("specdec_suffix.tree", "specdec_suffix.store", "specdec_suffix.drafts")
"""The tries' own functions, and the choice of drafts."""

LEAST_CAPACITY = 64


class TrieArrays:
    """Table, nodes and, for growing texts, loci of one trie; owns the memory that its row points to."""

    def __init__(self, row: np.ndarray, capacity: int, depth: int | None = None) -> None:
        """Make an empty trie.

        Args:
            row: int64 [NUM_COLUMNS], writable; lives as long as this object.
            capacity: nodes to make room for.
            depth: for a growing text, the trie's depth.
        """
        row[:] = 0
        row[layout.FREE] = layout.NONE
        row[layout.RING] = 1
        self._row = row
        self._loci = np.zeros(0 if depth is None else depth + 1, dtype=np.int32)
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        slots = 1 << max(int(np.ceil(np.log2(max(capacity, LEAST_CAPACITY) * 4 / 3))), 1)
        self.capacity = 3 * slots // 4
        self._table = np.zeros(slots, dtype=np.int32)
        self._nodes = np.empty(self.capacity * layout.NODE_WIDTH, dtype=np.int32)
        self.attach(self._row)

    def attach(self, row: np.ndarray) -> None:
        """Write the addresses into a row: the trie's own, or a copy that takes its place."""
        self._row = row
        columns = [layout.TABLE, layout.NODES, layout.LOCI, layout.SLOTS, layout.CAPACITY]
        arrays = (self._table, self._nodes, self._loci)
        row[columns] = [*(array.ctypes.data for array in arrays), len(self._table), self.capacity]

    def grow(self, capacity: int) -> None:
        """Make room for more nodes, all of which stay as they are."""
        old = self._nodes
        self._allocate(capacity)
        self._nodes[: len(old)] = old
        KERNELS.function("enter_all")(self._row)

    @property
    def nodes(self) -> np.ndarray:
        """int32 [capacity, NODE_WIDTH]."""
        return self._nodes.reshape(-1, layout.NODE_WIDTH)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._table.nbytes + self._nodes.nbytes + self._loci.nbytes
