"""Metrics of engines for Prometheus, read when they are asked for.

Sums and states come from the engine itself, so that a metric is right between steps too; only what has a distribution
is gathered step by step. Names follow vLLM's, with the prefix ``specdec:``; a collector gives both on request.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from specdec.metrics import StatLogger

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from specdec.metrics import EngineStats, RequestStats, StepStats

PREFIX = "specdec:"
VLLM_PREFIX = "vllm:"
FINISH_REASONS = ("stop", "length", "abort", "error")

Rows = list[tuple[tuple[str, ...], float]]
"""Label values beyond the engine's own, and the number."""

_LATENCIES = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOTALS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@frozen
class Scalar:
    """A counter or gauge that is read from an engine's statistics."""

    name: str
    kind: str
    help: str
    read: Callable[[EngineStats, PrometheusStatLogger], Rows]
    labels: tuple[str, ...] = ()
    vllm: bool = False
    """Whether vLLM has it too."""


@frozen
class Distribution:
    """A histogram that is filled while the engine runs."""

    name: str
    help: str
    buckets: tuple[float, ...]
    vllm: bool = True


def _one(value: float) -> Rows:
    return [((), float(value))]


def _per_position(counts: Iterable[int]) -> Rows:
    return [((str(position),), float(count)) for position, count in enumerate(counts)]


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every number in a nested mapping; what is no number is passed over."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, float(value)


SCALARS: tuple[Scalar, ...] = (
    Scalar(
        "num_requests_running", "gauge", "Requests that hold KV blocks", lambda s, _: _one(s.num_running), vllm=True
    ),
    Scalar("num_requests_waiting", "gauge", "Requests in the queue", lambda s, _: _one(s.num_waiting), vllm=True),
    Scalar("kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1", lambda s, _: _one(s.kv_usage), vllm=True),
    Scalar("kv_blocks_free", "gauge", "KV blocks that no request holds", lambda s, _: _one(s.free_blocks)),
    Scalar("kv_blocks", "gauge", "KV blocks in total", lambda s, _: _one(s.total_blocks)),
    Scalar("steps", "counter", "Steps of the engine", lambda s, _: _one(s.num_steps)),
    Scalar("prompt_tokens", "counter", "Prompt tokens computed", lambda s, _: _one(s.num_prompt_tokens), vllm=True),
    Scalar(
        "generation_tokens",
        "counter",
        "Tokens committed to outputs",
        lambda s, _: _one(s.num_generated_tokens),
        vllm=True,
    ),
    Scalar("num_preemptions", "counter", "Preempted requests", lambda s, _: _one(s.num_preemptions), vllm=True),
    Scalar(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache",
        lambda s, _: _one(s.num_prompt_tokens + s.num_cached_tokens),
        vllm=True,
    ),
    Scalar(
        "prefix_cache_hits", "counter", "Prompt tokens found there", lambda s, _: _one(s.num_cached_tokens), vllm=True
    ),
    Scalar(
        "request_success",
        "counter",
        "Requests that ended, by reason",
        lambda _, logger: [((reason,), float(logger.finished[reason])) for reason in FINISH_REASONS],
        labels=("finished_reason",),
        vllm=True,
    ),
    Scalar("spec_decode_num_drafts", "counter", "Drafts verified", lambda s, _: _one(s.num_drafts), vllm=True),
    Scalar(
        "spec_decode_num_draft_tokens",
        "counter",
        "Draft tokens verified",
        lambda s, _: _one(s.num_draft_tokens),
        vllm=True,
    ),
    Scalar(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Draft tokens kept",
        lambda s, _: _one(s.num_accepted_tokens),
        vllm=True,
    ),
    Scalar(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Draft tokens kept at each draft position",
        lambda s, _: _per_position(s.num_accepted_tokens_per_pos),
        labels=("position",),
        vllm=True,
    ),
    Scalar(
        "spec_decode_num_draft_tokens_per_pos",
        "counter",
        "Draft tokens verified at each draft position",
        lambda s, _: _per_position(s.num_draft_tokens_per_pos),
        labels=("position",),
    ),
    Scalar(
        "spec_decode_mean_acceptance_length",
        "gauge",
        "Tokens gained per verified draft since the start, the recovered or bonus token included",
        lambda s, _: _one(s.mean_acceptance_length),
    ),
    Scalar(
        "step_seconds",
        "counter",
        "Wall time of steps, by stage",
        lambda s, _: [
            (("propose",), s.propose_seconds),
            (("target",), s.target_seconds),
            (("verify",), s.verify_seconds),
            (("rest",), s.rest_seconds),
        ],
        labels=("stage",),
    ),
    Scalar(
        "proposer_faults",
        "counter",
        "Drafts that failed: the proposer raised, broke its contract or was too slow",
        lambda s, logger: [((logger.proposer,), float(s.num_proposer_faults))],
        labels=("proposer",),
    ),
    Scalar(
        "speculation_disabled",
        "gauge",
        "1 when the proposer was switched off after too many faults in a row",
        lambda s, _: _one(s.speculation_disabled),
    ),
    Scalar(
        "speculation_paused",
        "gauge",
        "1 while the engine drafts nothing because it does not pay",
        lambda s, _: _one(s.speculation_paused),
    ),
    Scalar(
        "speculation_current_tokens",
        "gauge",
        "Most draft tokens per request that the controller asks for now",
        lambda s, _: _one(s.current_draft_tokens),
    ),
    Scalar("speculation_lossless", "gauge", "0 when the verifier is lossy", lambda s, _: _one(s.lossless)),
    Scalar(
        "proposer_stat",
        "gauge",
        "What the proposer counts itself, by dotted name; of each member, where it has members",
        lambda s, logger: [((logger.proposer, name), value) for name, value in _numbers(s.proposer)],
        labels=("proposer", "name"),
    ),
    Scalar(
        "proposer_memory_bytes",
        "gauge",
        "Memory that the proposer holds",
        lambda s, logger: [((logger.proposer, name), value) for name, value in _numbers(s.proposer_memory)],
        labels=("proposer", "purpose"),
    ),
    Scalar(
        "grammar_cut_tokens",
        "counter",
        "Draft tokens that grammars refused before they were verified",
        lambda s, _: _one(s.num_grammar_cut_tokens),
    ),
    Scalar(
        "grammar_forced_tokens",
        "counter",
        "Tokens added behind drafts because a grammar left one continuation, verified; not draft tokens",
        lambda s, _: _one(s.num_grammar_forced_tokens),
    ),
    Scalar(
        "grammar_accepted_tokens",
        "counter",
        "Of the tokens added behind drafts because a grammar left one continuation, those kept",
        lambda s, _: _one(s.num_grammar_accepted_tokens),
    ),
    Scalar("grammar_seconds", "counter", "Time spent on grammars", lambda s, _: _one(s.grammar_seconds)),
    Scalar(
        "speculation_info",
        "gauge",
        "1; how the engine speculates",
        lambda _, logger: [((logger.proposer, logger.verifier, logger.num_speculative_tokens), 1.0)],
        labels=("proposer", "verifier", "num_speculative_tokens"),
    ),
)

TIME_TO_FIRST_TOKEN = Distribution("time_to_first_token_seconds", "From arrival until the first token", _LATENCIES)
INTER_TOKEN_LATENCY = Distribution("inter_token_latency_seconds", "Between steps that gave a request tokens", _GAPS)
E2E_LATENCY = Distribution("e2e_request_latency_seconds", "From arrival until the end", _TOTALS)
QUEUE_TIME = Distribution("request_queue_time_seconds", "From arrival until first scheduled", _LATENCIES)
TIME_PER_OUTPUT_TOKEN = Distribution("request_time_per_output_token_seconds", "Mean per token after the first", _GAPS)
PROMPT_TOKENS = Distribution("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
GENERATION_TOKENS = Distribution("request_generation_tokens", "Output tokens of a request", _TOKENS)

DISTRIBUTIONS: tuple[Distribution, ...] = (
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_LATENCY,
    QUEUE_TIME,
    TIME_PER_OUTPUT_TOKEN,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
)


class Histogram:
    """Counts per bucket; filled by one thread, read by others."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) of each bucket, and the sum of all values."""
        rows, running = [], 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), list(self._counts), strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows, self._sum


class PrometheusStatLogger(StatLogger):
    """The stat logger ``prometheus``: its engine's metrics show in `ENGINES`' collectors until it is closed.

    Args:
        model_name: the label of the same name.
        proposer: the method, or empty without speculation.
        verifier: the verifier's name.
        num_speculative_tokens: most draft tokens per step.
    """

    def __init__(self, *, model_name: str, proposer: str, verifier: str, num_speculative_tokens: int) -> None:
        self.model_name: str = model_name
        self.proposer: str = proposer
        self.verifier: str = verifier
        self.num_speculative_tokens: str = str(num_speculative_tokens)
        self.finished: Counter[str] = Counter()
        self.histograms = {distribution: Histogram(distribution.buckets) for distribution in DISTRIBUTIONS}
        self.totals: Callable[[], EngineStats] | None = None

    def start(self, totals: Callable[[], EngineStats]) -> None:
        """The engine is ready: show its metrics."""
        self.totals = totals
        ENGINES.add(self)

    def record(self, step: StepStats) -> None:
        """Add the step's latencies."""
        first, gaps = self.histograms[TIME_TO_FIRST_TOKEN], self.histograms[INTER_TOKEN_LATENCY]
        for seconds in step.first_token_seconds:
            first.observe(seconds)
        for seconds in step.inter_token_seconds:
            gaps.observe(seconds)

    def record_request(self, request: RequestStats) -> None:
        """Add a request that has ended."""
        self.finished[request.finish_reason] += 1
        observed = {
            E2E_LATENCY: request.total_seconds,
            QUEUE_TIME: request.queued_seconds,
            TIME_PER_OUTPUT_TOKEN: request.time_per_output_token,
            PROMPT_TOKENS: request.num_prompt_tokens,
            GENERATION_TOKENS: request.num_output_tokens,
        }
        for distribution, value in observed.items():
            if value is not None:
                self.histograms[distribution].observe(value)

    def close(self) -> None:
        """The engine stops: its metrics go."""
        ENGINES.remove(self)


class Engines:
    """The loggers of the engines that run in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loggers: dict[int, PrometheusStatLogger] = {}

    def add(self, logger: PrometheusStatLogger) -> None:
        """Take an engine in; it gets the smallest free number as its label ``engine``."""
        with self._lock:
            number = next(i for i in range(len(self._loggers) + 1) if i not in self._loggers)
            self._loggers[number] = logger

    def remove(self, logger: PrometheusStatLogger) -> None:
        """Leave an engine out; harmless when it is not in."""
        with self._lock:
            self._loggers = {number: other for number, other in self._loggers.items() if other is not logger}

    def items(self) -> list[tuple[str, PrometheusStatLogger]]:
        """(label ``engine``, logger) of each."""
        with self._lock:
            return [(str(number), logger) for number, logger in sorted(self._loggers.items())]


ENGINES = Engines()


class EngineCollector(Collector):
    """The metrics of all engines of this process, for a `prometheus_client.CollectorRegistry`.

    Args:
        vllm_names: give those that vLLM has under its names as well.
        model_names: the label ``model_name`` of models that go by another name than the engine's, by that one.
    """

    def __init__(self, *, vllm_names: bool = False, model_names: Mapping[str, str] | None = None) -> None:
        self._vllm_names = vllm_names
        self._model_names = dict(model_names or {})

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        engines = [
            (self._model_names.get(log.model_name, log.model_name), number, log, log.totals())
            for number, log in ENGINES.items()
            if log.totals is not None
        ]
        yield from _families(PREFIX, engines, only_vllm=False)
        if self._vllm_names:
            yield from _families(VLLM_PREFIX, engines, only_vllm=True)


def _families(
    prefix: str, engines: list[tuple[str, str, PrometheusStatLogger, Any]], *, only_vllm: bool
) -> Iterator[Metric]:
    base = ("model_name", "engine")
    for scalar in SCALARS:
        if only_vllm and not scalar.vllm:
            continue
        family_class: Any = CounterMetricFamily if scalar.kind == "counter" else GaugeMetricFamily
        family = family_class(prefix + scalar.name, scalar.help, labels=(*base, *scalar.labels))
        for model_name, number, logger, stats in engines:
            for labels, value in scalar.read(stats, logger):
                family.add_metric((model_name, number, *labels), value)
        yield family
    for distribution in DISTRIBUTIONS:
        if only_vllm and not distribution.vllm:
            continue
        histogram = HistogramMetricFamily(prefix + distribution.name, distribution.help, labels=base)
        for model_name, number, logger, _ in engines:
            buckets, total = logger.histograms[distribution].cumulative()
            histogram.add_metric((model_name, number), buckets, total)
        yield histogram


def metric_names(prefix: str = PREFIX) -> set[str]:
    """Every time series name that `EngineCollector` gives, as queries write them."""
    names = {
        prefix + scalar.name + ("_total" if scalar.kind == "counter" else "")
        for scalar in SCALARS
        if prefix == PREFIX or scalar.vllm
    }
    for distribution in DISTRIBUTIONS:
        if prefix == PREFIX or distribution.vllm:
            names |= {prefix + distribution.name + ending for ending in ("_bucket", "_sum", "_count")}
    return names
