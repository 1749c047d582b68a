"""Acceptance by request and draft position, learned online with discount.

Two probabilities per position i: that the proposer drafts it, given position i - 1 was drafted and the limit allows it
(n-gram lookup often finds nothing), and that it is accepted, given it was drafted and i - 1 accepted. Requests have
little evidence of their own, so each is shrunk towards the engine's pool.

A tree's positions are its nodes, in the order in which a smaller tree would leave the last ones out. Of siblings one is
accepted at most, so a node's probability is that of lying on the accepted path, whatever came of those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_DISCOUNT = 0.98
"""Weight of evidence from one step to the next."""
_LEAST_WEIGHT = 8.0
"""Drafts' worth of evidence that age does not take away: what is known stays the best guess."""
_POOL_WEIGHT = 5.0
"""How many drafts of its own weigh as much as the pool in a request's estimate."""
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
_TESTED, _ACCEPTED, _OFFERED, _DRAFTED = range(4)


@frozen
class Estimate:
    """What is believed of the positions of drafts, each [requests, positions]."""

    accept: np.ndarray
    """Probability that a drafted position is accepted, given those before it are."""
    spread: np.ndarray
    """Standard deviation of `accept`."""
    fill: np.ndarray
    """Probability that the position is drafted when the limit allows it; falls along positions."""

    def survival(self, deviations: float) -> np.ndarray:
        """Probability that a drafted position is accepted with all before it.

        Args:
            deviations: standard deviations by which each is taken to be higher than believed.
        """
        taken = np.minimum(np.maximum(self.accept + deviations * self.spread, 0.0), 1.0)
        return np.asarray(taken.cumprod(axis=1))


class TreeEstimate(Estimate):
    """What is believed of the nodes of trees; `accept` is the probability that a node lies on the accepted path."""

    def survival(self, deviations: float) -> np.ndarray:
        """Probability that each node is accepted, evened out so that it falls along the nodes.

        Where a node is likelier than some before it, as a child of the likeliest among its siblings, they share what
        they bring: a tree that ends between them is thought better than it is, but larger ones are not given up for it.

        Args:
            deviations: standard deviations by which the length of the accepted path is taken to be higher than
                believed.
        """
        length = self.accept.sum(axis=1, keepdims=True)
        doubt = np.sqrt(np.square(self.spread).sum(axis=1, keepdims=True))
        factor = np.maximum(1.0 + deviations * doubt / np.maximum(length, 1e-9), 0.0)
        return np.minimum(_falling(self.accept * factor), 1.0)


def _falling(numbers: np.ndarray) -> np.ndarray:
    """The slopes of the least concave functions above the running sums of rows (pool adjacent violators)."""
    result = np.empty_like(numbers)
    for row, slopes in zip(numbers, result, strict=True):
        sums: list[float] = []
        sizes: list[int] = []
        for number in row.tolist():
            total, size = number, 1
            while sums and sums[-1] * size < total * sizes[-1]:
                total += sums.pop()
                size += sizes.pop()
            sums.append(total)
            sizes.append(size)
        slopes[:] = np.repeat(np.array(sums) / np.array(sizes), sizes)
    return result


class Acceptance:
    """Discounted counts of up to ``num_positions`` draft positions."""

    _estimate_class = Estimate

    def __init__(self, num_positions: int) -> None:
        self._positions = np.arange(num_positions)
        self._counts = np.zeros((4, 16, num_positions))
        """By kind, slot and position; slot 0 is the pool of all requests."""
        self._slots: dict[str, int] = {}
        self._free = list(range(15, 0, -1))

    def record_outcomes(
        self, request_ids: Sequence[str], drafted: np.ndarray, accepted: Sequence[Sequence[int]]
    ) -> None:
        """Drafts were verified: int [n] tokens drafted, and the indices of those accepted, which are the first ones."""
        counts = np.array([len(nodes) for nodes in accepted])
        self._add(request_ids, _TESTED, self._first(np.minimum(counts + 1, drafted)), self._first(counts))

    def record_drafts(self, request_ids: Sequence[str], limits: np.ndarray, counts: np.ndarray) -> None:
        """Drafts were made: int [n] tokens allowed, of which ``counts`` were drafted."""
        self._add(request_ids, _OFFERED, self._first(np.minimum(counts + 1, limits)), self._first(counts))

    def age(self, num_steps: int) -> None:
        """Steps passed: what was seen before counts less beside what will be seen."""
        tries = self._counts[_TESTED::2]
        factor = np.maximum(np.minimum(_LEAST_WEIGHT / np.maximum(tries, 1e-9), 1.0), _DISCOUNT**num_steps)
        self._counts.reshape(2, 2, *tries.shape[1:])[:] *= factor[:, None]

    def estimate(self, request_ids: Sequence[str]) -> Estimate:
        """What is to be expected of each request."""
        slots = np.array([self._slots.get(request_id, 0) for request_id in request_ids])
        own = self._counts[:, slots] * (slots > 0)[:, None]
        tested, accepted, offered, drafted = self._counts[:, 0]
        # a position without evidence is like the others
        overall = (accepted.sum() + _PRIOR * _PRIOR_WEIGHT) / (tested.sum() + _PRIOR_WEIGHT)
        accept = _shrunk(own[_ACCEPTED], own[_TESTED], accepted, tested, overall)
        fill = _shrunk(own[_DRAFTED], own[_OFFERED], drafted, offered, _PRIOR)
        weight = own[_TESTED] + np.minimum(tested + _PRIOR_WEIGHT, _POOL_WEIGHT)
        spread = np.sqrt((accept * (1.0 - accept) + 0.25 / weight) / weight)
        return self._estimate_class(accept, spread, fill.cumprod(axis=1))

    def finish(self, request_id: str) -> None:
        """A request ended."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._counts[:, slot] = 0.0
            self._free.append(slot)

    def _first(self, numbers: np.ndarray) -> np.ndarray:
        """bool [n, positions]: so many of the first positions."""
        return np.asarray(self._positions < numbers[:, None])

    def _add(self, request_ids: Sequence[str], kind: int, tries: np.ndarray, hits: np.ndarray) -> None:
        slots = np.array([self._slot(request_id) for request_id in request_ids])
        for offset, positions in ((kind, tries), (kind + 1, hits)):
            counts = positions.astype(np.float64)
            np.add.at(self._counts[offset], slots, counts)
            self._counts[offset, 0] += counts.sum(axis=0)

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                size = self._counts.shape[1]
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
                self._free = list(range(2 * size - 1, size - 1, -1))
            slot = self._slots[request_id] = self._free.pop()
        return slot


class TreeAcceptance(Acceptance):
    """The same of up to ``num_positions`` nodes of trees. A chain is a tree, too."""

    _estimate_class = TreeEstimate

    def record_outcomes(
        self, request_ids: Sequence[str], drafted: np.ndarray, accepted: Sequence[Sequence[int]]
    ) -> None:
        """Drafts were verified: int [n] nodes drafted, and the indices of those on the accepted paths."""
        on_path = np.zeros((len(drafted), len(self._positions)), dtype=bool)
        for row, nodes in zip(on_path, accepted, strict=True):
            row[list(nodes)] = True
        self._add(request_ids, _TESTED, self._first(drafted), on_path)


def _shrunk(
    hits: np.ndarray, tries: np.ndarray, pool_hits: np.ndarray, pool_tries: np.ndarray, prior: float
) -> np.ndarray:
    """Rates of requests, shrunk towards the pool's, which are shrunk towards a prior."""
    pool = (pool_hits + prior * _PRIOR_WEIGHT) / (pool_tries + _PRIOR_WEIGHT)
    return np.asarray((hits + _POOL_WEIGHT * pool) / (tries + _POOL_WEIGHT))
