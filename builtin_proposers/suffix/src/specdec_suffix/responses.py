"""The store of past responses: which there are, whose they are, and when they leave."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from specdec_suffix import layout
from specdec_suffix.trie import KERNELS, TrieArrays

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_RING = 1024


@frozen
class _Stored:
    """Where a response lies in the ring, and in which scope."""

    scope: str
    begin: int
    length: int


class ResponseStore:
    """Past responses of all scopes, bounded in number and in tokens; the oldest of all leave first.

    The tokens lie in one ring that grows to its bound before it is used again from the beginning, so that positions in
    it never change. Scopes have tries of their own over the same nodes: nothing of one is found from another.
    """

    def __init__(self, *, depth: int, max_responses: int, max_tokens: int) -> None:
        self._depth = depth
        self._max_responses = max_responses
        self._max_tokens = max_tokens
        self.row = np.zeros(layout.NUM_COLUMNS, dtype=np.int64)
        """int64 [NUM_COLUMNS]: the trie, as compiled code takes it."""
        self._trie = TrieArrays(self.row, 0)
        self._use_ring(np.empty(min(_LEAST_RING, max_tokens), dtype=np.int64))
        self.row[layout.RING] = max(max_tokens, 1)
        self._stored: deque[_Stored] = deque()
        self._tail = 0
        self._roots: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.num_evicted = 0
        """Responses that had to leave."""

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_tokens(self) -> int:
        """Tokens of all stored responses."""
        return sum(self._sizes.values())

    @property
    def num_scopes(self) -> int:
        """Scopes that have a stored response."""
        return len(self._roots)

    @property
    def num_nodes(self) -> int:
        """Nodes in use."""
        return int(self.row[layout.IN_USE])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._trie.nbytes + self._ring.nbytes

    def _use_ring(self, ring: np.ndarray) -> None:
        self._ring = ring
        self.address = int(ring.ctypes.data)
        """Of the ring; changes when responses are added."""

    def root(self, scope: str) -> int:
        """The root of a scope's trie, `layout.NONE` when nothing is stored in it."""
        return self._roots.get(scope, layout.NONE)

    def add(self, scope: str, tokens: np.ndarray) -> bool:
        """Store a response.

        Args:
            scope: where it can be found.
            tokens: int64 [n].

        Returns:
            Whether it was; one that is longer than the whole store, or empty, is not.
        """
        length = len(tokens)
        if length == 0 or length + 1 > self._max_tokens or self._max_responses == 0:
            return False
        while len(self._stored) >= self._max_responses:
            self._evict()
        begin = self._place(length + 1)
        self._ring[begin : begin + length] = tokens
        self._ring[begin + length] = layout.END
        self._tail = begin + length + 1
        self._stored.append(_Stored(scope, begin, length))
        self.row[layout.OLDEST] = self._stored[0].begin
        needed = self.num_nodes + 2 * length + 1
        if needed > self._trie.capacity:
            self._trie.grow(max(3 * self._trie.capacity // 2, needed))
        if scope not in self._roots:
            self._roots[scope] = KERNELS.function("new_root")(self.row)
            self._sizes[scope] = 0
        self._sizes[scope] += length
        KERNELS.function("add_text")(self.row, self._roots[scope], self.address, begin, begin + length, self._depth)
        return True

    def responses(self) -> Iterator[tuple[str, np.ndarray]]:
        """Scope and tokens of every response, the oldest first."""
        for stored in self._stored:
            yield stored.scope, self._ring[stored.begin : stored.begin + stored.length]

    def _place(self, size: int) -> int:
        """Room for so many tokens in a row: behind the newest, else from the beginning; the oldest leave for it."""
        if not self._stored:
            self._tail = 0
        begin = self._tail
        if begin + size > self._max_tokens:
            # Whatever lies between here and the ring's end is older than what lies at its beginning.
            while self._stored and self._stored[0].begin >= begin:
                self._evict()
            begin = 0
        while self._stored and begin <= self._stored[0].begin < begin + size:
            self._evict()
        if begin + size > len(self._ring):
            grown = np.empty(min(max(2 * len(self._ring), begin + size), self._max_tokens), dtype=np.int64)
            grown[: len(self._ring)] = self._ring
            self._use_ring(grown)
        return begin

    def _evict(self) -> None:
        oldest = self._stored.popleft()
        root = self._roots[oldest.scope]
        end = oldest.begin + oldest.length
        KERNELS.function("remove_text")(self.row, root, self.address, oldest.begin, end, self._depth)
        self.num_evicted += 1
        self._sizes[oldest.scope] -= oldest.length
        if self._sizes[oldest.scope] == 0:
            KERNELS.function("free_root")(self.row, root)
            del self._roots[oldest.scope], self._sizes[oldest.scope]
        if self._stored:
            self.row[layout.OLDEST] = self._stored[0].begin
