"""Draft length from measured cost and acceptance: ``speculation = "auto"``.

The goodput rule (Liu et al., SmartSpec / TurboSpec, arXiv 2406.14066): of all sets of draft positions take the one with
the most expected tokens per second,

    (B + sum of survival probabilities) / (draft time + step time with B + T rows),

where B requests decode and T positions are drafted. The best set of T positions holds the T likeliest, and since the
probabilities fall along a draft it is a prefix of each request's. A tree's nodes are such positions in their order.
Step time and draft time are learned online (`specdec.control.cost`), acceptance per request and position with discount
(`specdec.control.acceptance`).

A rule that only exploits what it knows would never learn that a long draft became cheap or a text predictable. So now
and then the plan is one that would be the fastest if all were a little better than it is believed to be. The loss that
is expected of it is paid from an allowance that grows with a small share of the time spent: whatever happens, looking
costs no more than that share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from specdec.control.acceptance import Acceptance, TreeAcceptance
from specdec.control.base import Control
from specdec.control.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.control.base import Outcome
    from specdec.control.cost import Curve
    from specdec.control.schedule import Schedule

_PLAN_EVERY = 4
"""Steps between two plans for the same requests."""
_CAUTION, _HOPE = 0.5, 1.0
"""Standard deviations by which costs and acceptance are taken to be worse than believed, and better when exploring."""
_ALLOWANCE_SHARE = 0.008
"""Share of the time spent that exploring may cost."""
_FIRST_ALLOWANCE, _MOST_ALLOWANCE = 1.0, 2.0
"""Steps' worth of time that the allowance begins with, and at which it stops growing."""
_LEAST_GAIN = 1.01
"""How much faster drafting must be than not drafting; less is within what noise makes of measurements."""
_UNSURE = 0.1
"""Relative standard deviation of a step's cost from which a plan holds for one step only."""
_LEAST_SURVIVAL = 0.01
"""Positions less likely to be accepted are not considered."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Longest drafts that are compared, beside the limit itself."""


@frozen
class _Plan:
    """A choice for the next steps."""

    lengths: np.ndarray
    """int [B]: draft tokens of each request."""
    seconds: float
    """Expected time of a step, drafting included."""
    tokens: float
    """Expected tokens of a step."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class AdaptiveControl(Control):
    """Chooses the draft length of each request by expected speed."""

    def __init__(
        self,
        schedule: Schedule,
        num_speculative_tokens: int,
        *,
        most_rows: int,
        drafts_every_step: bool = False,
        trees: bool = False,
    ) -> None:
        """Start without knowledge.

        Args:
            schedule: upper limits by batch size.
            num_speculative_tokens: the largest limit.
            most_rows: the most rows of a step that only decodes.
            drafts_every_step: the proposer is also called when nothing is drafted, which takes time then, too.
            trees: drafts may be trees; their length is the number of nodes.
        """
        self._schedule = schedule
        self._every_step = drafts_every_step
        self._step_cost = CostModel.of_steps(most_rows)
        self._draft_cost = CostModel.of_drafts(num_speculative_tokens)
        self._acceptance = (TreeAcceptance if trees else Acceptance)(num_speculative_tokens)
        self._kmax = np.array([k for k in _LENGTHS if k < num_speculative_tokens] + [num_speculative_tokens])
        self._positions = np.arange(num_speculative_tokens)
        self._enough = np.searchsorted(self._kmax, self._positions + 1) + 1
        """How many of the longest drafts are to be compared when a position is the last that is worth drafting."""
        self._seen = _Seen()
        self._num_requests = 0
        self._plan = np.zeros(0, dtype=np.int64)
        self._plan_for: tuple[str, ...] = ()
        self._plan_steps = 0
        """Steps that the plan is still good for."""
        self._explored = False
        """Whether the plan explores."""
        self._allowance = 0.0
        self._has_begun = False

    # --- deciding -----------------------------------------------------------------------------------

    def limits(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """See `Control.limits`."""
        ids = tuple(request_ids)
        self._num_requests = len(ids)
        self._plan_steps -= 1
        self._seen.steps += 1
        if self._plan_steps < 0 or ids != self._plan_for:
            allowed = np.minimum(np.array(caps, dtype=np.int64), self._schedule.limit(len(ids)))
            self._plan_for, self._plan_steps = ids, _PLAN_EVERY - 1
            if allowed.any():
                self._learn()
                self._plan = self._make_plan(ids, allowed)
            else:
                self._plan, self._explored = np.zeros_like(allowed), False
        found = [min(length, cap) for length, cap in zip(self._plan.tolist(), caps, strict=True)]
        self.current = max(found, default=0)
        return found

    def _make_plan(self, request_ids: tuple[str, ...], allowed: np.ndarray) -> np.ndarray:
        estimate = self._acceptance.estimate(request_ids)
        cost = self._step_cost.curve(len(request_ids))
        doubted = estimate.survival(-_CAUTION)
        options = self._options(doubted, estimate.fill, allowed)
        options.evaluate(doubted, cost, _CAUTION)
        best, plain = options.at(options.fastest()), options.plain
        if best.rate <= plain.rate * _LEAST_GAIN:
            best = plain
        elif np.interp(len(allowed) + best.lengths.sum(), cost.x, cost.spread) > _UNSURE:
            self._plan_steps = 0
        self.is_paused = best is plain
        other = None
        if self._allowance > 0 and not self._explored:
            other = self._exploration(options, estimate.survival(_HOPE), cost, best)
        self._explored = other is not None
        return best.lengths if other is None else other.lengths

    def _exploration(self, options: _Options, hoped: np.ndarray, cost: Curve, best: _Plan) -> _Plan | None:
        """What looks best with hope, of what the allowance can pay for; for as many steps as it can.

        Args:
            options: evaluated with caution, as ``best`` was found; evaluated anew here.
            hoped: [B, K]: probability that each position is accepted, with hope.
            cost: of a step.
            best: the plan without exploring.
        """
        losses = np.maximum(options.seconds - options.tokens / best.rate, 0.0)
        affordable = losses <= self._allowance
        if not affordable.any():
            return None
        options.evaluate(hoped, cost, -_HOPE)
        option = options.fastest(affordable)
        loss, found, plain = float(losses.flat[option]), options.at(option), options.plain
        if best.lengths.any() and plain.rate > found.rate:
            loss, found = plain.seconds - plain.tokens / best.rate, plain
        if loss > self._allowance or np.array_equal(found.lengths, best.lengths):
            return None
        num_steps = int(min(self._allowance / max(loss, 1e-12), _PLAN_EVERY))
        self._plan_steps = num_steps - 1
        self._allowance -= loss * num_steps
        return found

    def _options(self, survival: np.ndarray, fill: np.ndarray, allowed: np.ndarray) -> _Options:
        """All sets of draft positions worth comparing.

        Args:
            survival: [B, K]: probability that each is accepted, which says what positions are the likeliest.
            fill: [B, K]: probability that each is drafted.
            allowed: int [B]: the most draft tokens of each request.
        """
        num_requests = len(allowed)
        usable = (self._positions < allowed[:, None]) & (survival >= _LEAST_SURVIVAL)
        usable[:, 0] = allowed > 0
        # likeliest first; equals by position, then request, so that a cut leaves prefixes
        likely = np.where(usable, survival, -1.0).T.ravel()
        order = (-likely).argsort(kind="stable")[: np.count_nonzero(usable)]
        position, request = np.divmod(order, num_requests)
        kmax = self._kmax[: 1 if self._draft_cost.is_empty else int(self._enough[position.max()])]
        included = position < kmax[:, None]
        drafted = included * fill[request, position]
        draft_seconds = self._draft_cost.seconds(num_requests, np.concatenate([[0], kmax]))
        return _Options(
            num_requests,
            request,
            position,
            included,
            drafted,
            drafted.cumsum(axis=1),
            included.cumsum(axis=1),
            draft_seconds[1:, None],
            float(draft_seconds[0]) if self._every_step else 0.0,
        )

    # --- learning -----------------------------------------------------------------------------------

    def record_step(self, num_requests: int, num_tokens: int, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """See `Control.record_step`."""
        if num_requests and num_tokens:
            self._seen.step_seconds.setdefault((num_requests, num_tokens), []).append(seconds)
        elif num_requests:
            self._step_cost.guess(num_requests, num_requests, seconds)
        earned = _ALLOWANCE_SHARE if self._has_begun else _FIRST_ALLOWANCE
        self._has_begun = True
        self._allowance = min(self._allowance + earned * seconds, _MOST_ALLOWANCE * seconds)
        self._seen.outcomes.extend(outcomes)

    def record_draft(
        self, request_ids: Sequence[str], limits: Sequence[int], counts: Sequence[int], seconds: float
    ) -> None:
        """See `Control.record_draft`."""
        longest = max(limits, default=0)
        if longest or self._every_step:
            self._seen.draft_seconds.setdefault((max(self._num_requests, 1), longest), []).append(seconds)
        self._seen.drafts.extend(zip(request_ids, limits, counts, strict=True))

    def finish(self, request_id: str) -> None:
        """See `Control.finish`."""
        self._learn()
        self._acceptance.finish(request_id)

    def _learn(self) -> None:
        """Take in what was seen since the last time; together, because that takes less time."""
        seen, self._seen = self._seen, _Seen()
        for cost, measured in ((self._step_cost, seen.step_seconds), (self._draft_cost, seen.draft_seconds)):
            for (num_requests, x), seconds in measured.items():
                # the lower median, because what disturbs makes steps slower
                cost.observe(num_requests, x, sorted(seconds)[(len(seconds) - 1) // 2], len(seconds))
        self._acceptance.age(seen.steps)
        if seen.drafts:
            ids, limits, counts = zip(*seen.drafts, strict=True)
            self._acceptance.record_drafts(ids, np.array(limits), np.array(counts))
        if seen.outcomes:
            ids, drafted, accepted = zip(*seen.outcomes, strict=True)
            self._acceptance.record_outcomes(ids, np.array(drafted), accepted)


class _Seen:
    """What happened since it was last learned from."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_seconds: dict[tuple[int, int], list[float]] = {}
        """By requests and rows."""
        self.draft_seconds: dict[tuple[int, int], list[float]] = {}
        """By requests and longest draft."""
        self.drafts: list[tuple[str, int, int]] = []
        self.outcomes: list[Outcome] = []


@define(eq=False)
class _Options:
    """Sets of draft positions: for each of M longest drafts, the likeliest n of N positions."""

    num_requests: int
    request: np.ndarray
    """int [N]: request of each position, likeliest first."""
    position: np.ndarray
    """int [N]."""
    included: np.ndarray
    """bool [M, N]: whether each of the longest drafts allows the position."""
    drafted: np.ndarray
    """[M, N]: probability that the position is allowed and drafted."""
    rows: np.ndarray
    """[M, N]: expected rows of drafts with the positions up to here."""
    most_rows: np.ndarray
    """[M, N]: rows if everything that is allowed is drafted."""
    draft_seconds: np.ndarray
    """[M, 1]: expected time of drafting."""
    idle_seconds: float
    """Expected time of the proposer when nothing is drafted."""
    tokens: np.ndarray = field(init=False)
    """[M, N]: expected tokens of the step."""
    seconds: np.ndarray = field(init=False)
    """[M, N]: expected time of the step, drafting included."""
    plain: _Plan = field(init=False)

    def evaluate(self, survival: np.ndarray, cost: Curve, doubt: float) -> None:
        """Set what is expected of each option.

        Args:
            survival: [B, K]: probability that each position is accepted.
            cost: of a step, by rows.
            doubt: standard deviations by which more rows are taken to cost more than believed.
        """
        n = self.num_requests
        self.tokens = n + (self.drafted * survival[self.request, self.position]).cumsum(axis=1)
        times = cost.seconds * np.maximum(1.0 + doubt * cost.spread, 0.5)
        plain = float(np.interp(n, cost.x, times))
        # With few requests the rows are all or nothing: a mixture of a plain step and one with the whole draft.
        mixed = self.rows / np.maximum(self.most_rows, 1) * (np.interp(n + self.most_rows, cost.x, times) - plain)
        even = np.interp(n + self.rows, cost.x, times) - plain if n > 1 else 0.0
        self.seconds = plain + (mixed + (n - 1) * even) / n + self.draft_seconds
        self.plain = _Plan(np.zeros(n, dtype=np.int64), plain + self.idle_seconds, float(n))

    def fastest(self, among: np.ndarray | None = None) -> int:
        """Index into the flat arrays of the option with the highest rate, of all or of those that a mask [M, N] has."""
        rates = self.tokens / np.maximum(self.seconds, 1e-12)
        return int((rates if among is None else np.where(among, rates, 0.0)).argmax())

    def at(self, option: int) -> _Plan:
        """The plan of an option, by its index into the flat arrays."""
        m, n = divmod(option, self.tokens.shape[1])
        chosen = self.request[: n + 1][self.included[m, : n + 1]]
        lengths = np.bincount(chosen, minlength=self.num_requests)
        return _Plan(lengths, float(self.seconds[m, n]), float(self.tokens[m, n]))
