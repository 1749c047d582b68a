"""Step and draft time learned online, as a function of the number of requests and of rows (or of the longest draft).

The time is taken to be a sum: something fixed, something for each request, and something for each row, which may differ
between few rows and many (a straight line between powers of two):

    speed * (1 + a (requests - 1) + sum over intervals j of w_j * (rows within interval j)).

So what is measured at one batch size serves the others, and what is measured at some draft lengths the lengths between
and beyond. A Kalman filter learns the parameters; one more is the speed of the machine now, which neighbours, the clock
and growing contexts change for all steps alike. Residuals are clipped, so that one pause of the operating system moves
little.
"""

from __future__ import annotations

import math

import numpy as np
from attrs import frozen

_NOISE = 0.06
"""Relative standard deviation of one measurement."""
_CLIP = 2.5
"""Largest residual that counts, in standard deviations."""
_UNKNOWN = 10.0
"""Relative standard deviation of the machine's speed before the first measurement."""
_DRIFT = 0.01
"""Relative standard deviation of the machine's speed from one measurement to the next."""
_SPREAD = 2.0
"""Standard deviation of the parameters, in units of their prior means."""
_CORRELATION = 0.8
"""Between the growth in neighbouring intervals."""
_RENEWAL = 1 / 2000
"""Share of the prior's variance that each measurement adds: what is not measured becomes uncertain again."""
_DOUBLED = 1.5
"""Prior mean of what a step with twice the rows takes, relative to the step."""
_REQUEST = 0.03
"""Prior mean of what a request adds."""


@frozen(eq=False)
class Curve:
    """Seconds at rising x, to be joined by straight lines."""

    x: np.ndarray
    seconds: np.ndarray
    spread: np.ndarray
    """Relative standard deviations of what the time at each x is beside that of x = number of requests."""


class CostModel:
    """Seconds by (number of requests, x); never falling in x."""

    def __init__(self, knots: np.ndarray, growth: np.ndarray) -> None:
        """Know nothing yet but a prior.

        Args:
            knots: float [J + 1], rising: ends of the intervals of x.
            growth: float [J]: prior mean of what each interval adds over its whole width, in units of the fixed part.
        """
        self.is_empty = True
        self._knots = knots
        self._widths = np.diff(knots)
        self._whole = np.tril(np.ones((len(knots), len(self._widths))), -1) * self._widths
        """How much of each interval lies below each knot."""
        self._unit = np.concatenate([[_REQUEST], growth / self._widths])
        self._state = np.ones(len(self._unit))
        size = len(self._unit)
        apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
        prior = _SPREAD**2 * _CORRELATION**apart
        prior[0, 1:] = prior[1:, 0] = 0.0
        self._covariance = np.zeros((size + 1, size + 1))
        self._covariance[0, 0] = _UNKNOWN**2
        self._covariance[1:, 1:] = prior
        self._process = np.zeros_like(self._covariance)
        self._process[0, 0] = _DRIFT**2
        self._process[1:, 1:] = _RENEWAL * prior
        self._speed = 0.0

    @classmethod
    def of_steps(cls, most_rows: int) -> CostModel:
        """A step by its rows; `_DOUBLED` says what more rows take until something else is known."""
        number = max(1, math.ceil(math.log2(max(most_rows, 2))))
        powers = np.arange(number + 1)
        return cls(2.0**powers, np.diff(_DOUBLED**powers))

    @classmethod
    def of_drafts(cls, longest: int) -> CostModel:
        """A draft by its longest length; each token takes half as long as the call until something else is known."""
        number = max(1, math.ceil(math.log2(max(longest, 2))))
        knots = np.concatenate([[0.0], 2.0 ** np.arange(number + 1)])
        return cls(knots, 0.5 * np.diff(knots))

    def guess(self, num_requests: int, x: float, seconds: float) -> None:
        """Nothing was measured yet, but this time is of the right order."""
        if self.is_empty:
            self._speed = seconds / self._value(self._features(num_requests, x))

    def observe(self, num_requests: int, x: float, seconds: float, count: int = 1) -> None:
        """Learn that ``count`` measurements were about ``seconds``."""
        if seconds <= 0:
            return
        features = self._features(num_requests, x)
        value = self._value(features)
        if self.is_empty:
            self.is_empty, self._speed = False, seconds / value
        covariance = self._covariance
        covariance += count * self._process
        row = np.concatenate([[1.0], features / value])
        shared = covariance @ row
        variance = float(row @ shared) + _NOISE**2 / count
        gain = shared / variance
        most = _CLIP * math.sqrt(variance)
        residual = max(-most, min(most, seconds / (self._speed * value) - 1.0))
        covariance -= np.outer(gain, shared)
        change = residual * gain
        self._speed *= math.exp(change[0])
        self._state += change[1:]

    def seconds(self, num_requests: int, x: np.ndarray) -> np.ndarray:
        """What is believed for a number of requests, at each x; that there is no cost while nothing is known."""
        growth = np.maximum(self._state, 0.0) * self._unit
        value = 1.0 + growth[0] * (num_requests - 1) + self._whole @ growth[1:]
        return np.asarray(np.interp(x, self._knots, self._speed * value))

    def curve(self, num_requests: int) -> Curve:
        """What is believed for a number of requests at all x, and how surely."""
        seconds = self.seconds(num_requests, self._knots)
        apart = self._whole - np.minimum(np.maximum(num_requests - self._knots[:-1], 0.0), self._widths)
        apart *= self._unit[1:]
        variance = ((apart @ self._covariance[2:, 2:]) * apart).sum(axis=1)
        unit = self._speed / np.maximum(seconds, 1e-12)
        return Curve(self._knots, seconds, np.sqrt(np.maximum(variance, 0.0)) * unit)

    def _value(self, features: np.ndarray) -> float:
        """A time in units of the fixed part."""
        return 1.0 + float(features @ np.maximum(self._state, 0.0))

    def _features(self, num_requests: int, x: float) -> np.ndarray:
        """What multiplies each parameter."""
        inside = np.minimum(np.maximum(x - self._knots[:-1], 0.0), self._widths)
        return self._unit * np.concatenate([[num_requests - 1.0], inside])
