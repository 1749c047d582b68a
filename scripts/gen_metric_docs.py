"""Writes docs/reference/metrics.md from the metrics' definitions; with --check, fails when it is out of date."""

from __future__ import annotations

import sys

import attrs
from pages import code, head, prose, table, write_or_check

from specdec.config.introspect import field_docs
from specdec.metrics.stats import EngineStats, RequestStats, StepStats
from specdec.types import SpecStats
from specdec_server.metrics.http import HTTPMetrics
from specdec_server.metrics.prometheus import DISTRIBUTIONS, PREFIX, SCALARS, VLLM_PREFIX

LEAD = f"""\
What an engine counts, under the names in which it is found. How to read it: [Read the
metrics](../how-to/read-the-metrics.md).

## Prometheus

`specdec serve` shows these at `/metrics`, with the prefix `{PREFIX}` and the labels `model_name` and `engine`. Those
marked with `vLLM` are called the same there; with `--vllm-metrics` they are shown under `{VLLM_PREFIX}` as well.
Histograms have the endings `_bucket`, `_sum` and `_count`.
"""

CLASSES = {
    EngineStats: (
        "Of an engine",
        "`LLM.stats()`, `AsyncLLM.stats()` and `specdec generate --stats`: totals since the start.",
    ),
    SpecStats: ("Of a request", "`RequestOutput.spec_stats`, and `spec_stats` in the server's answers."),
    StepStats: ("Of a step", "What a [stat logger](hooks.md) receives after each step."),
    RequestStats: ("Of a request that ended", "What a stat logger receives when a request ends."),
}


def page() -> str:
    """The whole page."""
    scalars = [
        (
            code(scalar.name + ("_total" if scalar.kind == "counter" else "")),
            scalar.kind,
            ", ".join(map(code, scalar.labels)),
            prose(scalar.help),
            "vLLM" if scalar.vllm else "",
        )
        for scalar in SCALARS
    ]
    histograms = [(code(d.name), "histogram", "", prose(d.help), "vLLM" if d.vllm else "") for d in DISTRIBUTIONS]
    rows = table(("metric", "kind", "more labels", "meaning", "also in"), [*scalars, *histograms, *_http()])
    return "\n".join([head("gen_metric_docs.py", "the metrics", "Metrics", LEAD), rows, *map(_class, CLASSES)])


def _http() -> list[tuple[str, ...]]:
    found = []
    for collector in HTTPMetrics().registry._collector_to_names:
        name = collector._name.removeprefix(PREFIX) + ("_total" if collector._type == "counter" else "")
        found.append(
            (code(name), collector._type, ", ".join(map(code, collector._labelnames)), collector._documentation, "")
        )
    return found


def _class(cls: type) -> str:
    title, lead = CLASSES[cls]
    docs = field_docs(cls)
    rows = [(code(f.name), prose(docs.get(f.name, ""))) for f in attrs.fields(cls)]
    rows += [
        (code(name), prose((value.__doc__ or "").partition("\n")[0]))
        for name, value in vars(cls).items()
        if isinstance(value, property)
    ]
    return f"## {title}\n\n{lead}\n\n{table((f'`specdec.{_module(cls)}.{cls.__name__}`', 'meaning'), rows)}"


def _module(cls: type) -> str:
    return "types" if cls.__module__ == "specdec.types" else "metrics"


if __name__ == "__main__":
    sys.exit(write_or_check("metrics.md", "the metrics", page))
