"""Draft length from measured cost and acceptance: ``speculation = "auto"``.

The goodput rule (Liu et al., SmartSpec / TurboSpec, arXiv 2406.14066): of all sets of draft positions take the one with
the most expected tokens per second,

    (B + sum of survival probabilities) / (draft time + step time with B + T rows),

where B requests decode and T positions are drafted. The best set of T positions holds the T likeliest, and since the
probabilities fall along a draft it is a prefix of each request's. Step time and draft time are learned online
(`specdec.control.cost`), acceptance per request and position with discount (`specdec.control.acceptance`).

A rule that only exploits what it knows would never learn that a long draft became cheap or a text predictable. So
single steps explore, and each pays its expected loss from an allowance that grows with a small share of the time spent:
whatever happens, exploring costs no more than that share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, frozen

from specdec.control.acceptance import Acceptance
from specdec.control.base import Control
from specdec.control.cost import CostTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.control.schedule import Schedule

_PLAN_EVERY = 6
"""Steps between two plans for the same requests."""
_FIRST_LENGTH = 3
"""Draft tokens per request in the very first draft, when nothing is known."""
_PLAIN_STEPS, _FIRST_STEPS = 2, 8
"""Plain steps wanted before the first plan, and after how many steps the plan is made without them."""
_ALLOWANCE_SHARE = 0.015
"""Share of the time spent that exploring may cost."""
_ALLOWANCE_STEPS = 3.0
"""Steps' worth of time at which the allowance stops growing."""
_EXPLORE_GAP = 8
"""Fewest steps between two explored steps."""
_WORTH_EXPLORING = 1.02
"""How much faster an unmeasured length must possibly be."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 128
"""Steps from a pause to the next probe; doubled by each probe that finds nothing."""
_PROBE_DRAFTS = 3
"""Steps with a draft in one probe."""
_PROBE_STEPS = 12
"""Most steps of one probe, for proposers that often find nothing."""
_PROBE_WEIGHT = 8.0
"""Drafts that the evidence before a pause counts for after it."""
_LEAST_GAIN = 1.01
"""How much faster drafting must be than not drafting; less is within what noise makes of measurements."""
_LEAST_SURVIVAL = 0.01
"""Positions less likely to be accepted are not considered."""


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
        return self.tokens / self.seconds


@define
class _Pause:
    """Drafting is suspended."""

    interval: int = _FIRST_PAUSE
    next_probe: int = 0
    probe_drafts: int = 0
    probe_end: int = 0
    """Step at which the running probe ends; 0 when none runs."""


class AdaptiveControl(Control):
    """Chooses the draft length of each request by expected speed; costs some 20 microseconds per step."""

    def __init__(self, schedule: Schedule, num_speculative_tokens: int, *, drafts_every_step: bool = False) -> None:
        """Start without knowledge.

        Args:
            schedule: upper limits by batch size.
            num_speculative_tokens: the largest limit.
            drafts_every_step: the proposer is also called when nothing is drafted, which takes time then, too.
        """
        self._schedule = schedule
        self._k = num_speculative_tokens
        self._every_step = drafts_every_step
        self._step_cost = CostTable(relative_slope=0.01)
        self._draft_cost = CostTable(relative_slope=None)
        self._acceptance = Acceptance(num_speculative_tokens)
        self._kmax = np.array([k for k in _LENGTHS if k < num_speculative_tokens] + [num_speculative_tokens])
        self._clock = 0
        self._num_requests = 0
        self._num_plain_steps = self._num_first_steps = 0
        self._plan: _Plan | None = None
        self._plan_for: tuple[str, ...] = ()
        self._plan_caps: list[int] = []
        self._planned_at = 0
        self._explored_at = 0
        self._allowance = 0.0
        self._pause: _Pause | None = None

    # --- deciding -----------------------------------------------------------------------------------

    def limits(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """See `Control.limits`."""
        self._clock += 1
        self._num_requests = len(request_ids)
        allowed = np.minimum(caps, self._schedule.limit(len(request_ids)))
        if len(allowed) and allowed.any():
            lengths = np.minimum(self._lengths(tuple(request_ids), allowed), allowed)
        else:
            lengths = np.zeros_like(allowed)
        self.current = int(lengths.max(initial=0))
        found: list[int] = lengths.tolist()
        return found

    def _lengths(self, request_ids: tuple[str, ...], allowed: np.ndarray) -> np.ndarray:
        first = self._first_lengths(allowed)
        if first is not None:
            return first
        plan = self._plan
        joined = request_ids != self._plan_for
        if plan is None or joined or self._clock >= self._planned_at + _PLAN_EVERY or self._probing:
            if joined and self._pause is not None and not set(request_ids) <= set(self._plan_for):
                self._pause.interval = _FIRST_PAUSE  # a new text may be a predictable one
                self._pause.next_probe = min(self._pause.next_probe, self._clock + _FIRST_PAUSE)
            plan = self._make_plan(request_ids, allowed)
            self._plan, self._plan_for, self._planned_at = plan, request_ids, self._clock
        return plan.lengths

    def _first_lengths(self, allowed: np.ndarray) -> np.ndarray | None:
        """The first steps of an engine: a short draft, then some without, so that there is something to compare."""
        if self._draft_cost.is_empty:
            return np.minimum(allowed, _FIRST_LENGTH)
        if self._num_plain_steps < _PLAIN_STEPS and self._num_first_steps < _FIRST_STEPS:
            self._num_first_steps += 1
            return np.zeros_like(allowed)
        if self._step_cost.is_empty:  # prompts are in every step
            return np.minimum(allowed, _FIRST_LENGTH)
        return None

    @property
    def _probing(self) -> bool:
        return self._pause is not None and self._pause.probe_end > 0

    def _make_plan(self, request_ids: tuple[str, ...], allowed: np.ndarray) -> _Plan:
        options = _Options.of(self, request_ids, allowed)
        best, plain = options.best(), options.plain
        if best.rate <= plain.rate * _LEAST_GAIN:
            return self._paused_plan(options, plain)
        self._pause, self.is_paused = None, False
        return self._explored(options, best)

    def _paused_plan(self, options: _Options, plain: _Plan) -> _Plan:
        """Plain decoding, or a probe when one is due and can be afforded."""
        if self._pause is None:
            self._pause = _Pause(next_probe=self._clock + _FIRST_PAUSE)
            self._acceptance.forget_all_but(_PROBE_WEIGHT)
        self.is_paused = True
        pause = self._pause
        if pause.probe_end:
            if pause.probe_drafts >= _PROBE_DRAFTS or self._clock >= pause.probe_end:
                pause.probe_end = 0
                pause.interval = min(2 * pause.interval, _LONGEST_PAUSE)
                pause.next_probe = self._clock + pause.interval
        elif self._clock >= pause.next_probe:
            pause.probe_drafts, pause.probe_end = 0, self._clock + _PROBE_STEPS
        if not pause.probe_end:
            return plain
        probe = options.probe()
        return probe if self._afford(probe, plain) else plain

    def _explored(self, options: _Options, best: _Plan) -> _Plan:
        """The best plan, or now and then one that would be better if an unmeasured cost were as low as it can be."""
        if self._clock < self._explored_at + _EXPLORE_GAP:
            return best
        for other in (options.unmeasured_plain(), options.unmeasured(best.rate * _WORTH_EXPLORING)):
            if other is not None and self._afford(other, best):
                self._explored_at = self._clock
                self._planned_at = self._clock - _PLAN_EVERY  # for one step
                return other
        return best

    def _afford(self, other: _Plan, best: _Plan) -> bool:
        """Pay the expected loss of another plan for one step, if the allowance has it."""
        loss = max(other.seconds - other.tokens / best.rate, 0.0)
        if loss > self._allowance:
            return False
        self._allowance -= loss
        return True

    # --- learning -----------------------------------------------------------------------------------

    def record_step(
        self, num_requests: int, num_tokens: int, seconds: float, outcomes: Sequence[tuple[str, int, int]]
    ) -> None:
        """See `Control.record_step`."""
        if num_requests and num_tokens:
            self._num_plain_steps += num_tokens == num_requests
            self._step_cost.observe(num_requests, num_tokens, seconds)
            self._allowance = min(self._allowance + _ALLOWANCE_SHARE * seconds, _ALLOWANCE_STEPS * seconds)
        if outcomes:
            ids, drafted, accepted = zip(*outcomes, strict=True)
            self._acceptance.record_outcomes(ids, np.array(drafted), np.array(accepted))

    def record_draft(
        self, request_ids: Sequence[str], limits: Sequence[int], counts: Sequence[int], seconds: float
    ) -> None:
        """See `Control.record_draft`."""
        asked = np.array(limits)
        longest = int(asked.max(initial=0))
        if longest or self._every_step:
            self._draft_cost.observe(max(self._num_requests, 1), longest, seconds)
        if longest:
            made = np.array(counts)
            self._acceptance.record_drafts(request_ids, asked, made)
            if self._pause is not None and made.any():
                self._pause.probe_drafts += 1

    def finish(self, request_id: str) -> None:
        """See `Control.finish`."""
        self._acceptance.finish(request_id)


_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Longest drafts that are compared, beside the limit itself."""


@define(eq=False)
class _Options:
    """All sets of draft positions worth comparing: for each longest draft, the likeliest T positions."""

    num_requests: int
    request: np.ndarray
    """int [N]: request of each position, likeliest first."""
    kmax: np.ndarray
    """int [M]: the longest drafts compared."""
    included: np.ndarray
    """bool [M, N]: whether each of M longest drafts allows the position."""
    tokens: np.ndarray
    """[M, N]: expected tokens of the step with the positions up to here."""
    rows: np.ndarray
    """[M, N]: expected rows of the step."""
    draft_seconds: np.ndarray
    """[M]."""
    step_seconds: np.ndarray
    """[M, N]."""
    plain: _Plan
    control: AdaptiveControl

    @classmethod
    def of(cls, control: AdaptiveControl, request_ids: tuple[str, ...], allowed: np.ndarray) -> _Options:
        """Evaluate the options of a batch."""
        num_requests = len(request_ids)
        accept, fill = control._acceptance.estimate(request_ids)
        k = accept.shape[1]
        usable = (np.arange(k) < allowed[:, None]) & (accept >= _LEAST_SURVIVAL)
        usable[:, 0] = allowed > 0
        # likeliest first; equals by position, then request, so that a cut leaves prefixes
        flat = np.flatnonzero(usable.T)
        position, request = np.divmod(flat, num_requests)
        order = np.argsort(-accept[request, position], kind="stable")
        position, request = position[order], request[order]
        kmax = control._kmax[: int(np.searchsorted(control._kmax, int(position.max()) + 1)) + 1]
        included = position < kmax[:, None]
        likely_drafted = fill[request, position]
        gain = likely_drafted * accept[request, position]
        tokens = num_requests + np.cumsum(np.where(included, gain, 0.0), axis=1)
        rows = num_requests + np.cumsum(np.where(included, likely_drafted, 0.0), axis=1)
        draft = control._draft_cost.curve(num_requests)
        step = control._step_cost.curve(num_requests)
        idle = float(draft(np.zeros(1))[0]) if control._every_step and not control._draft_cost.is_empty else 0.0
        plain_seconds = float(step(np.array([float(num_requests)]))[0])
        # With few requests the rows are all or nothing: a mixture of a plain step and one with the whole draft.
        full = num_requests + np.cumsum(included, axis=1)
        share = (rows - num_requests) / np.maximum(full - num_requests, 1)
        mixed = plain_seconds + share * (step(full) - plain_seconds)
        weight = 1.0 / num_requests
        step_seconds = weight * mixed + (1.0 - weight) * step(rows) if num_requests > 1 else mixed
        return cls(
            num_requests,
            request,
            kmax,
            included,
            tokens,
            rows,
            np.maximum(draft(kmax.astype(np.float64)), idle),
            step_seconds,
            _Plan(np.zeros_like(allowed), plain_seconds + idle, float(num_requests)),
            control,
        )

    def best(self) -> _Plan:
        """The fastest option that drafts."""
        return self._at(int(self._rates().argmax()))

    def probe(self) -> _Plan:
        """The fastest option that drafts for a fair part of the requests."""
        least = min(-(-self.num_requests // 8), len(self.request))
        enough = np.cumsum(self.included, axis=1) >= least
        return self._at(int(np.where(enough, self._rates(), 0.0).argmax()))

    def unmeasured_plain(self) -> _Plan | None:
        """Plain decoding, when its cost is not known for this batch size."""
        known = self.control._step_cost.is_known(self.num_requests, np.array([self.num_requests]))
        return None if known[0] else self.plain

    def unmeasured(self, rate: float) -> _Plan | None:
        """An option that may reach ``rate`` if what is not measured costs as little as it can.

        Of several the one with the middle number of rows: measuring it halves the gap.
        """
        steps, drafts = self.control._step_cost, self.control._draft_cost
        floor = min(self.plain.seconds, float(self.step_seconds.min())) / 2
        step_low = np.clip(steps.lower_bound(self.num_requests, self.rows), floor, self.step_seconds)
        draft_low = np.minimum(drafts.lower_bound(self.num_requests, self.kmax), self.draft_seconds)
        rates = self.tokens / (draft_low[:, None] + step_low)
        known = steps.is_known(self.num_requests, self.rows) & drafts.is_known(self.num_requests, self.kmax)[:, None]
        options = np.flatnonzero((rates > rate) & ~known)
        if not len(options):
            return None
        rows = self.rows.ravel()[options]
        return self._at(int(options[np.argsort(rows)[len(rows) // 2]]))

    def _rates(self) -> np.ndarray:
        return np.asarray(self.tokens / (self.draft_seconds[:, None] + self.step_seconds))

    def _at(self, option: int) -> _Plan:
        """The plan of an option, by its index into the flat arrays."""
        m, n = divmod(option, self.rows.shape[1])
        chosen = self.request[: n + 1][self.included[m, : n + 1]]
        lengths = np.bincount(chosen, minlength=self.num_requests)
        return _Plan(lengths, float(self.draft_seconds[m] + self.step_seconds[m, n]), float(self.tokens[m, n]))
