"""What members are worth asking for a draft: the choice ``best``.

Each member is a box (M. Weitzman, "Optimal Search for the Best Alternative", Econometrica 1979). Opening it, which is
to let it draft for a request, takes time and shows whether it has a draft and how many of its tokens can be expected to
be accepted; in the end one draft is used. Time is worth the tokens that the engine makes in it. With f the part of the
requests asked about that a member has a draft for, e the tokens expected of such a draft, c the seconds of asking and r
the engine's tokens per second, a member's reservation value is the z at which opening the box neither gains nor loses,

    f (e - z) = r c,

and the best there is to do is to ask in order of z, and to stop when the draft in hand promises as much as the next z.
A member whose z is not above 0 is not worth asking at all.

What a member does is learned while it is asked; one that is not asked any more is tried now and then.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

_DISCOUNT = 0.98
_ACCEPT_PRIOR, _ACCEPT_PRIOR_WEIGHT = 0.7, 2.0
_FOUND_PRIOR, _FOUND_PRIOR_WEIGHT = 0.7, 2.0
_TRY_EVERY = 64
"""Proposals after which a member that was not asked is tried for one request."""
_STALE_WEIGHT = 8.0
"""Drafts that old evidence counts for when a member is tried again."""


@define
class Pace:
    """How many tokens per second the engine makes, learned with discount."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from one step, drafting included."""
        self._tokens = _DISCOUNT * self._tokens + num_tokens
        self._seconds = _DISCOUNT * self._seconds + seconds


@define
class Worth:
    """One member's drafts: how often there is one, of what length, how much is accepted, and what asking costs."""

    max_draft_tokens: int
    _tested: np.ndarray = field(init=False)
    _accepted: np.ndarray = field(init=False)
    _asked: float = 0.0
    _found: float = 0.0
    _length: float = 0.0
    _seconds: float = 0.0
    _unasked: int = 0
    """Proposals since it was asked."""

    def __attrs_post_init__(self) -> None:
        self._tested = np.zeros(self.max_draft_tokens)
        self._accepted = np.zeros(self.max_draft_tokens)

    def expected_tokens(self) -> np.ndarray:
        """[max_draft_tokens + 1]: tokens expected to be accepted of a draft of that length."""
        accepted = self._accepted + _ACCEPT_PRIOR * _ACCEPT_PRIOR_WEIGHT
        rate = accepted / (self._tested + _ACCEPT_PRIOR_WEIGHT)
        return np.concatenate([[0.0], np.cumsum(np.cumprod(rate))])

    def reservation(self, tokens_per_second: float) -> float:
        """The promise of a draft in hand from which on asking this member is not worth its time."""
        length = self._length / self._found if self._found > 0 else float(self.max_draft_tokens)
        expected = float(np.interp(length, np.arange(self.max_draft_tokens + 1), self.expected_tokens()))
        found = (self._found + _FOUND_PRIOR * _FOUND_PRIOR_WEIGHT) / (self._asked + _FOUND_PRIOR_WEIGHT)
        return expected - tokens_per_second * self.seconds_per_request / found

    @property
    def seconds_per_request(self) -> float:
        """What drafting for a request takes, asked in batches as they were; 0 while nothing is known."""
        return self._seconds / self._asked if self._asked > 0 else 0.0

    def try_now(self) -> bool:
        """Whether a member that may be asked again should be, whatever is known; old evidence counts less then."""
        self._unasked += 1
        if self._unasked <= _TRY_EVERY:
            return False
        factor = np.minimum(1.0, _STALE_WEIGHT / np.maximum(self._tested, _STALE_WEIGHT))
        self._tested *= factor
        self._accepted *= factor
        share = min(1.0, _STALE_WEIGHT / max(self._asked, _STALE_WEIGHT))
        self._asked, self._found = share * self._asked, share * self._found
        self._length, self._seconds = share * self._length, share * self._seconds
        return True

    def record_drafts(self, lengths: np.ndarray, seconds: float) -> None:
        """It was asked: int [n] tokens it drafted, 0 for none, in ``seconds`` together."""
        keep = _DISCOUNT ** len(lengths)
        self._unasked = 0
        self._asked = keep * self._asked + len(lengths)
        self._found = keep * self._found + int((lengths > 0).sum())
        self._length = keep * self._length + int(lengths.sum())
        self._seconds = keep * self._seconds + seconds

    def record_outcomes(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts were verified: int [n] tokens of each, and how many were kept."""
        positions = np.arange(self.max_draft_tokens)
        tested = np.minimum(accepted + 1, drafted)
        self._tested = _DISCOUNT * self._tested + (positions < tested[:, None]).sum(axis=0)
        self._accepted = _DISCOUNT * self._accepted + (positions < accepted[:, None]).sum(axis=0)
