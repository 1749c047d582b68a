"""Step time learned online: seconds by batch size and by a second number (rows of the batch, draft length).

Machines are noisy and drift: a neighbour, the clock, a growing context slow everything together. Each measurement is
therefore explained by two factors, one for the machine now and one for the cell: the first follows quickly and is
shared by all cells, so that cells measured at different times stay comparable. Residuals are clipped, so that one
pause of the operating system moves nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort

import numpy as np
from attrs import define

_GROWTH = 1.08
_MAX_X = 1 << 16
_CLIP = 0.25
"""Largest residual of one measurement that counts, in natural logarithms."""
_DRIFT_RATE = 0.08
_CELL_RATE = 0.06
"""Slowest update of a cell; the first measurements of a cell are averaged."""
_FEW = 5
"""Measurements of a cell that are kept."""
_KNOWN = 2
"""Measurements that make a cell known."""
_STALE = 400
"""Measurements of other cells after which a cell is not known any more."""
_FULL_WEIGHT = 32
"""Measurements beyond which a cell weighs no more in the fit."""


def _edges() -> np.ndarray:
    """Lower bounds of the cells: every number to begin with, then steps of `_GROWTH`."""
    found, x = [0], 1
    while x < _MAX_X:
        found.append(x)
        x = max(x + 1, int(x * _GROWTH))
    return np.array(found)


_EDGES = _edges()
_EDGE_LIST = _EDGES.tolist()


class CostTable:
    """Seconds as a function of (number of requests, x); increasing in x."""

    def __init__(self, relative_slope: float | None) -> None:
        """An empty table.

        Args:
            relative_slope: growth per unit of x of the only known cell, as long as there is only one: a fraction of its
                value, or None for proportional to x.
        """
        self._relative_slope = relative_slope
        self._rows: dict[int, _Row] = {}
        self._log_speed: float | None = None
        self._now = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._rows

    def observe(self, num_requests: int, x: int, seconds: float) -> None:
        """Learn from one measurement."""
        if seconds <= 0:
            return
        value = math.log(seconds)
        if self._log_speed is None:
            self._log_speed = value
        row = self._rows.setdefault(_bucket(num_requests), _Row())
        self._now += 1
        self._log_speed += _DRIFT_RATE * row.observe(x, value - self._log_speed, self._now)

    def is_known(self, num_requests: int, x: np.ndarray) -> np.ndarray:
        """Whether the cell of each x was measured often enough to be believed."""
        row = self._rows.get(_bucket(num_requests))
        known = [] if row is None else row.known(self._now)
        return np.isin(np.searchsorted(_EDGES, np.round(x), side="right"), known)

    def lower_bound(self, num_requests: int, x: np.ndarray) -> np.ndarray:
        """The least that is possible at each x if cost never falls: the cost at the known cell below it."""
        row = self._rows.get(_bucket(num_requests))
        known = [] if row is None else row.known(self._now)
        if row is None or not known:
            return np.zeros(np.shape(x))
        at = np.array([row.cells[index].x for index in known])
        low = self.curve(num_requests)(at)
        below = np.searchsorted(at, x + 0.5) - 1
        return np.where(below < 0, 0.0, low[np.maximum(below, 0)])

    def curve(self, num_requests: int) -> Curve:
        """What is known for a number of requests; the nearest known number when there is nothing."""
        bucket = _bucket(num_requests)
        row = self._rows.get(bucket)
        if row is not None and (row.is_fair or len(self._rows) == 1):
            return row.curve(self._log_speed or 0.0, self._relative_slope)
        others = [b for b, other in self._rows.items() if b != bucket and other.is_fair] or list(self._rows)
        nearest = self._rows[min(others, key=lambda b: abs(b - bucket))]
        curve = nearest.curve(self._log_speed or 0.0, self._relative_slope)
        if row is None:
            return curve
        own = row.curve(self._log_speed or 0.0, self._relative_slope)  # one cell: its height, the neighbour's shape
        scale = own.y[-1] / max(float(curve(own.x[-1:])[0]), 1e-12)
        return Curve(curve.x, curve.y * scale, curve.slope * scale)


@define(eq=False)
class _Cell:
    """Measurements of one batch size and about one x."""

    x: float
    """Mean x."""
    value: float
    """Log of seconds, relative to the machine's speed."""
    first: list[float]
    """The first measurements: their lower median is the value, because what disturbs makes steps slower."""
    count: int = 1
    last: int = 0
    """When it was measured last, on the table's clock."""

    def observe(self, x: int, relative: float) -> float:
        """Learn one measurement; returns the clipped residual."""
        residual = max(-_CLIP, min(_CLIP, relative - self.value))
        self.count += 1
        rate = max(_CELL_RATE, 1.0 / self.count)
        self.x += rate * (x - self.x)
        if self.count <= _FEW:
            insort(self.first, relative)
            self.value = self.first[(self.count - 1) // 2]
        else:
            self.value += rate * residual
        return residual


class _Row:
    """The cells of one batch size by index."""

    def __init__(self) -> None:
        self.cells: dict[int, _Cell] = {}
        self._curve: Curve | None = None

    def observe(self, x: int, relative: float, now: int) -> float:
        """Learn one measurement; returns the (clipped) residual."""
        self._curve = None
        index = bisect_right(_EDGE_LIST, x)
        cell = self.cells.get(index)
        if cell is None:
            self.cells[index] = _Cell(float(x), relative, [relative], last=now)
            return 0.0
        cell.last = now
        return cell.observe(x, relative)

    def known(self, now: int) -> list[int]:
        """The cells that were measured often enough, and not too long ago, to be believed."""
        return sorted(i for i, cell in self.cells.items() if cell.count >= _KNOWN and now - cell.last < _STALE)

    @property
    def is_fair(self) -> bool:
        """Whether the cells tell a shape."""
        return sum(cell.count >= _KNOWN for cell in self.cells.values()) > 1

    def curve(self, log_speed: float, relative_slope: float | None) -> Curve:
        speed = math.exp(log_speed)
        if self._curve is None:
            cells = [self.cells[index] for index in sorted(self.cells)]
            # one measurement may be anything; it is believed only for want of better
            self._curve = _fit([cell for cell in cells if cell.count >= _KNOWN] or cells, relative_slope)
        relative = self._curve
        return Curve(relative.x, relative.y * speed, relative.slope * speed)


class Curve:
    """A function through known points: linear between them, constant below, going on with ``slope`` above."""

    __slots__ = ("slope", "x", "y")

    def __init__(self, x: np.ndarray, y: np.ndarray, slope: float) -> None:
        self.x = x
        self.y = y
        self.slope = slope

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Seconds at each x."""
        inside = np.interp(x, self.x, self.y)
        return np.asarray(inside + self.slope * np.maximum(x - self.x[-1], 0.0))


def _fit(cells: list[_Cell], relative_slope: float | None) -> Curve:
    """A non-decreasing curve through cells in order of x (weighted isotonic regression)."""
    blocks: list[list[float]] = []  # [value, weight, number of cells]
    for cell in cells:
        blocks.append([math.exp(cell.value), min(cell.count, _FULL_WEIGHT), 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            value, weight, number = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + value * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += number
    x = np.array([cell.x for cell in cells])
    y = np.repeat([block[0] for block in blocks], [int(block[2]) for block in blocks])
    if len(cells) == 1:
        at, value = float(x[0]), float(y[0])
        if relative_slope is None:
            return Curve(np.array([0.0, at]), np.array([0.0, value]), value / at) if at > 0 else Curve(x, y, value)
        return Curve(x, y, relative_slope * value)
    half = min(int(np.searchsorted(x, x[-1] / 2)), len(x) - 2)  # a wide base, because neighbours differ by noise
    return Curve(x, y, float(y[-1] - y[half]) / max(float(x[-1] - x[half]), 1.0))


def _bucket(num_requests: int) -> int:
    """Two buckets per doubling of the batch."""
    return round(2 * math.log2(max(num_requests, 1)))
