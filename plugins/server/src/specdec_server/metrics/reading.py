"""Reads a metrics page back: sums over labels, counts since the last look, percentiles of histograms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from attrs import define, field
from prometheus_client.parser import text_string_to_metric_families

from specdec_server.metrics.prometheus import PREFIX

Labels = tuple[tuple[str, str], ...]
_ENGINE_LABELS = ("model_name", "engine")


@define(eq=False)
class Snapshot:
    """One page of metrics."""

    samples: dict[str, dict[Labels, float]] = field(factory=lambda: defaultdict(dict))

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From Prometheus' text format.

        Raises:
            ValueError: it is none.
        """
        snapshot = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                snapshot.samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
        return snapshot

    def value(self, name: str, **labels: str) -> float:
        """The sum over everything that has these labels; 0 when there is nothing. The prefix is added."""
        wanted = labels.items()
        found = self.samples.get(PREFIX + name, {})
        return sum(value for key, value in found.items() if wanted <= dict(key).items())

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of every series of a metric."""
        return [dict(key) for key in self.samples.get(PREFIX + name, {})]

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for key, value in self.samples.get(PREFIX + name, {}).items():
            sums[dict(key).get(label, "")] += value
        return dict(sums)

    def since(self, earlier: Snapshot) -> Snapshot:
        """What was added after ``earlier``; only right for counters and histograms.

        Where a server was started again in between, its counters have begun again: what is there was added.
        """
        restarted = any(
            value < was.get(key, 0.0) for rows, was in self._counters(earlier) for key, value in rows.items()
        )
        base = {} if restarted else earlier.samples
        return Snapshot(
            {
                name: {labels: value - base.get(name, {}).get(labels, 0.0) for labels, value in rows.items()}
                for name, rows in self.samples.items()
            }
        )

    def _counters(self, earlier: Snapshot) -> Iterable[tuple[dict[Labels, float], dict[Labels, float]]]:
        """The counters of this page beside those of an earlier one."""
        return ((r, earlier.samples.get(n, {})) for n, r in self.samples.items() if n.endswith("_total"))

    def quantile(self, name: str, share: float) -> float | None:
        """A percentile of a histogram, as Prometheus' ``histogram_quantile``; None when it is empty."""
        buckets = sorted((float(bound), count) for bound, count in self.by(name + "_bucket", "le").items())
        return _quantile(buckets, share)


def _quantile(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    rows = list(buckets)
    if not rows or rows[-1][1] <= 0:
        return None
    rank = share * rows[-1][1]
    lower = before = 0.0
    for bound, count in rows:
        if count >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * ((rank - before) / (count - before) if count > before else 1.0)
        lower, before = bound, count
    return lower
