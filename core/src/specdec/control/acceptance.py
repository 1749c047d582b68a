"""Acceptance by request and draft position, learned online with discount.

Two probabilities per position i: that the proposer drafts it, given position i - 1 was drafted and the limit allows it
(n-gram lookup often finds nothing), and that it is accepted, given it was drafted and i - 1 accepted. Requests have
little evidence of their own, so each is shrunk towards the engine's pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN_DISCOUNT = 0.97
_POOL_DISCOUNT = 0.98
_POOL_WEIGHT = 24.0
"""How many drafts of its own weigh as much as the pool in a request's estimate."""
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
_TESTED, _ACCEPTED, _OFFERED, _DRAFTED = range(4)


class Acceptance:
    """Discounted counts of up to ``num_positions`` draft positions."""

    def __init__(self, num_positions: int) -> None:
        self._positions = np.arange(num_positions)
        self._pool = np.zeros((4, num_positions))
        self._own = np.zeros((4, 16, num_positions))
        self._slots: dict[str, int] = {}
        self._free = list(range(15, -1, -1))

    def record_outcomes(self, request_ids: Sequence[str], drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts were verified: int [n] tokens drafted, of which the first ``accepted`` were kept."""
        tested = np.minimum(accepted + 1, drafted)
        self._add(request_ids, _TESTED, tested, accepted)

    def record_drafts(self, request_ids: Sequence[str], limits: np.ndarray, counts: np.ndarray) -> None:
        """Drafts were made: int [n] tokens allowed, of which ``counts`` were drafted."""
        offered = np.minimum(counts + 1, limits)
        self._add(request_ids, _OFFERED, offered, counts)

    def estimate(self, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities for each request and position.

        Returns:
            [n, positions] that a drafted position is accepted (with all before it), and [n, positions] that the
            position is drafted when the limit allows it. Both fall along positions.
        """
        slots = np.array([self._slots.get(request_id, -1) for request_id in request_ids])
        own = self._own[:, slots] * (slots >= 0)[:, None]
        accepted, tested, drafted, offered = (self._pool[kind] for kind in (_ACCEPTED, _TESTED, _DRAFTED, _OFFERED))
        # a position without evidence is like the others
        overall = (accepted.sum() + _PRIOR * _PRIOR_WEIGHT) / (tested.sum() + _PRIOR_WEIGHT)
        accept = _shrunk(own[_ACCEPTED], own[_TESTED], accepted, tested, overall)
        fill = _shrunk(own[_DRAFTED], own[_OFFERED], drafted, offered, _PRIOR)
        return np.cumprod(accept, axis=1), np.cumprod(fill, axis=1)

    def forget_all_but(self, weight: float) -> None:
        """Cut the evidence on acceptance to ``weight`` drafts, so that new evidence counts soon."""
        for counts in (self._pool[None], np.moveaxis(self._own, 1, 0)):
            factor = np.minimum(1.0, weight / np.maximum(counts[:, _TESTED], weight))
            counts[:, _TESTED] *= factor
            counts[:, _ACCEPTED] *= factor

    def finish(self, request_id: str) -> None:
        """A request ended."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._own[:, slot] = 0.0
            self._free.append(slot)

    def _add(self, request_ids: Sequence[str], kind: int, tries: np.ndarray, hits: np.ndarray) -> None:
        slots = np.array([self._slot(request_id) for request_id in request_ids])
        tried = (self._positions < tries[:, None]).astype(np.float64)
        hit = (self._positions < hits[:, None]).astype(np.float64)
        for offset, counts in ((kind, tried), (kind + 1, hit)):
            self._own[offset, slots] = _OWN_DISCOUNT * self._own[offset, slots] + counts
            self._pool[offset] = _POOL_DISCOUNT * self._pool[offset] + counts.sum(axis=0)

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            if not self._free:
                size = self._own.shape[1]
                self._own = np.concatenate([self._own, np.zeros_like(self._own)], axis=1)
                self._free = list(range(2 * size - 1, size - 1, -1))
            slot = self._slots[request_id] = self._free.pop()
        return slot


def _shrunk(
    hits: np.ndarray, tries: np.ndarray, pool_hits: np.ndarray, pool_tries: np.ndarray, prior: float
) -> np.ndarray:
    """Rates of requests, shrunk towards the pool's, which are shrunk towards a prior."""
    pool = (pool_hits + prior * _PRIOR_WEIGHT) / (pool_tries + _PRIOR_WEIGHT)
    return np.asarray((hits + _POOL_WEIGHT * pool) / (tries + _POOL_WEIGHT))
