"""Numbers of a load: throughput, percentiles of latencies, acceptance. Names are those of vLLM's benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from specdec_server.bench.client import Result


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as NumPy's default; 0 when there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(results: Sequence[Result], duration: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """Everything that is reported, as plain values; times in milliseconds."""
    good = [result for result in results if result.error is None]
    outputs = sum(result.num_output_tokens for result in good)
    prompts = sum(result.num_prompt_tokens for result in good)
    numbers: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": sorted({result.error for result in results if result.error})[:10],
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
        "max_concurrent_requests": most_at_once(results),
    }
    latencies = {
        "ttft": [result.ttft for result in good if result.arrivals],
        "tpot": [tpot for result in good if (tpot := result.tpot) is not None],
        "itl": [gap for result in good for gap in result.gaps],
        "e2el": [result.e2e for result in good],
    }
    for name, seconds in latencies.items():
        numbers.update(_latency(name, [1000 * value for value in seconds], percentiles))
    return {**numbers, **_speculation(good)}


def _latency(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) if values else 0.0
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": spread,
        **{f"p{share:g}_{name}_ms": percentile(values, share) for share in percentiles},
    }


def _speculation(results: Sequence[Result]) -> dict[str, Any]:
    """Sums over requests, when the server told them."""
    told = [result.spec_stats for result in results if result.spec_stats]
    drafts = sum(stats["num_drafts"] for stats in told)
    if not drafts:
        return {}
    drafted = sum(stats["num_draft_tokens"] for stats in told)
    accepted = sum(stats["num_accepted_tokens"] for stats in told)
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
    }


def most_at_once(results: Sequence[Result]) -> int:
    """How many requests ran at the busiest moment."""
    changes = [(result.started, 1) for result in results] + [(result.ended, -1) for result in results]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


_LATENCIES = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "between pieces"),
    ("e2el", "whole request"),
)


def tables(numbers: dict[str, Any], percentiles: Sequence[float]) -> list[Table]:
    """Throughput, and latencies in milliseconds."""
    totals = Table.grid(padding=(0, 2))
    totals.add_row("requests", f"{numbers['completed']} completed, {numbers['failed']} failed")
    totals.add_row("duration", f"{numbers['duration']:.2f} s, at most {numbers['max_concurrent_requests']} at once")
    totals.add_row("requests/s", f"{numbers['request_throughput']:.2f}")
    totals.add_row("output tokens/s", f"{numbers['output_throughput']:.1f}")
    totals.add_row("total tokens/s", f"{numbers['total_token_throughput']:.1f}")
    if "spec_decode_acceptance_length" in numbers:
        rate = numbers["spec_decode_acceptance_rate"]
        totals.add_row("acceptance length", f"{numbers['spec_decode_acceptance_length']:.2f} (rate {rate:.0%})")
    latency = Table(header_style="bold")
    latency.add_column("ms")
    columns = ["mean", "median", *(f"p{share:g}" for share in percentiles if share != 50)]
    for column in columns:
        latency.add_column(column, justify="right")
    for name, label in _LATENCIES:
        values = [numbers[f"{column}_{name}_ms"] for column in columns]
        latency.add_row(label, *(f"{value:.2f}" if any(values) else "-" for value in values))
    return [totals, latency]
