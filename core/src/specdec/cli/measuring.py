"""Measures several configurations on the same prompts in one process, taking turns.

Machines drift: frequency, heat, neighbours. So the variants take turns batch by batch, in an order that rotates, and
are compared by the medians over rounds. Commands of plugins may use this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, field, frozen

from specdec.cli import engines
from specdec.metrics import EngineStats

if TYPE_CHECKING:
    from specdec.cli.prompts import Prompt
    from specdec.config import EngineConfig, SpeculativeConfig
    from specdec.outputs import RequestOutput
    from specdec.sampling.params import SamplingParams


@frozen(kw_only=True)
class Run:
    """One variant's turn in one round."""

    round: int
    seconds: float
    num_tokens: int
    stats: EngineStats
    """What the engine did in this turn."""
    num_decoded: int = 0
    """Output tokens without the first of each request."""
    decode_seconds: float = 0.0
    """Time between the first and the last token, summed over requests."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time, prefill included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of a request once its first token is there."""
        return self.num_decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


@define
class Variant:
    """One configuration, and what was measured of it."""

    name: str
    config: EngineConfig
    speculation: Mapping[str, Any] | None = None
    """What each request says about its speculation; variants of equal configurations share an engine."""
    runs: list[Run] = field(factory=list)
    token_ids: list[list[int]] = field(factory=list)
    """The outputs of the first round, in the order of the prompts."""
    texts: list[str] = field(factory=list)
    runs_in: str = ""
    """Dtype and device of its engine, in words."""

    @property
    def median_rate(self) -> float:
        """Median over the rounds of tokens per second."""
        return median(run.tokens_per_second for run in self.runs)

    @property
    def median_decode_rate(self) -> float:
        """Median over the rounds of a request's tokens per second after its first token."""
        return median(run.decode_rate for run in self.runs)

    @property
    def overall(self) -> Run:
        """All rounds together."""
        return _together(len(self.runs), self.runs)

    @property
    def stats(self) -> EngineStats:
        """What the engine did in all rounds together."""
        return sum_stats([run.stats for run in self.runs])


def variants_of(config: EngineConfig, speculative: Sequence[SpeculativeConfig]) -> list[Variant]:
    """Plain decoding and one variant for each speculative configuration, all else equal."""
    variants = [Variant("plain", attrs.evolve(config, speculative=None))]
    for one in speculative:
        name = _unused(one.method or str(one.model), one.most_draft_tokens, {v.name for v in variants})
        variants.append(Variant(name, attrs.evolve(config, speculative=one)))
    return variants


def _unused(name: str, k: int, taken: set[str]) -> str:
    candidates = [name, f"{name} k={k}", *(f"{name} k={k} #{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def measure(
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    rounds: int,
    batch_size: int,
    advance: Callable[[Variant, int], None] | None = None,
) -> None:
    """Run every variant on the prompts, ``rounds`` times, and add what was measured to it.

    From the second round on, methods that learn from finished requests know the answers; see `measure_once`.

    A short generation before the first round is not measured. Each prompt has the same seed in every variant and round.

    Args:
        variants: all are loaded at once, so memory must hold them together.
        prompts: the work of one round.
        params: of every request but for the seed.
        rounds: how often each variant runs each prompt.
        batch_size: prompts given to the engine at a time.
        advance: called after each batch with its variant and number of prompts, for a progress bar.

    Raises:
        SpecdecError: an engine cannot start, or a prompt is not acceptable.
    """
    with _running(variants, prompts, params) as (engines_of, inputs, seeded):
        for number in range(rounds):
            runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
            for turn, part in enumerate(_parts(len(inputs), batch_size)):
                for variant, engine in _rotated(engines_of, number + turn):
                    run = _turn(variant, engine, inputs[part], seeded[part], number, advance, is_new=number == 0)
                    runs[variant.name].append(run)
            for variant in variants:
                variant.runs.append(_together(number, runs[variant.name]))


def measure_once(
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    batch_size: int,
    advance: Callable[[Variant, int], None] | None = None,
) -> None:
    """Run every variant on each prompt once, in turns after each batch, and add a run for each batch to it.

    Nothing is repeated, so that methods which learn from finished requests do not know the answers. Arguments and
    errors are as for `measure`.
    """
    with _running(variants, prompts, params) as (engines_of, inputs, seeded):
        for number, part in enumerate(_parts(len(inputs), batch_size)):
            for variant, engine in _rotated(engines_of, number):
                variant.runs.append(_turn(variant, engine, inputs[part], seeded[part], number, advance, is_new=True))


def _parts(count: int, batch_size: int) -> list[slice]:
    """What is given to an engine at a time."""
    return [slice(start, start + batch_size) for start in range(0, count, batch_size)]


_Engines = list[tuple["Variant", Any]]


@contextmanager
def _running(
    variants: Sequence[Variant], prompts: Sequence[Prompt], params: SamplingParams
) -> Iterator[tuple[_Engines, list[Any], list[SamplingParams]]]:
    """Warm engines of the variants, the prompts as they take them, and their parameters."""
    with ExitStack() as stack:
        for variant in variants if len(variants) > 1 else ():  # the last one's mistakes before the first one's loading
            engines.check(variant.config)
        engines_of = list[tuple[Variant, Any]]()
        for variant in variants:
            shared = next((engine for other, engine in engines_of if other.config == variant.config), None)
            engines_of.append((variant, shared or stack.enter_context(engines.open_llm(variant.config))))
        inputs = [prompt.for_engine(engines_of[0][1]) for prompt in prompts]
        seeded = [attrs.evolve(params, seed=number) for number in range(len(prompts))]
        for variant, engine in engines_of:
            variant.runs_in = f"{engine.dtype} on {engine.device}"
            warm_up(engine, inputs[0], params)
        yield engines_of, inputs, seeded


def _rotated(engines_of: _Engines, number: int) -> _Engines:
    """The order in which variants take turns at a batch."""
    first = number % len(engines_of)
    return [*engines_of[first:], *engines_of[:first]]


def warm_up(engine: Any, prompt: Any, params: SamplingParams) -> None:
    """Let everything be loaded and compiled that the first use loads and compiles."""
    engine.generate([prompt], attrs.evolve(params, max_tokens=8, min_tokens=0, ignore_eos=True), use_tqdm=False)


def _turn(
    variant: Variant,
    engine: Any,
    inputs: list[Any],
    params: list[SamplingParams],
    number: int,
    advance: Callable[[Variant, int], None] | None,
    *,
    is_new: bool,
) -> Run:
    """One variant's turn at one batch; ``is_new`` says that the prompts were not in an earlier one."""
    before, begin = engine.stats(), time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False, speculation=variant.speculation)
    seconds = time.perf_counter() - begin
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    if is_new:
        variant.token_ids += token_ids
        variant.texts += [output.outputs[0].text for output in outputs]
    if advance is not None:
        advance(variant, len(inputs))
    return Run(
        round=number,
        seconds=seconds,
        num_tokens=sum(map(len, token_ids)),
        stats=engine.stats().since(before),
        num_decoded=sum(max(len(ids) - 1, 0) for ids in token_ids),
        decode_seconds=sum(map(_decode_seconds, outputs)),
    )


def _together(number: int, runs: Sequence[Run]) -> Run:
    """Several turns as one."""
    return Run(
        round=number,
        seconds=sum(run.seconds for run in runs),
        num_tokens=sum(run.num_tokens for run in runs),
        stats=sum_stats([run.stats for run in runs]),
        num_decoded=sum(run.num_decoded for run in runs),
        decode_seconds=sum(run.decode_seconds for run in runs),
    )


def _decode_seconds(output: RequestOutput) -> float:
    timings = output.timings
    if timings is None or timings.total is None or timings.first_token is None:
        return 0.0
    return timings.total - timings.first_token


def share_identical(variant: Variant, other: Variant) -> float:
    """The part of the prompts whose output tokens are the same in both; 1.0 without prompts."""
    pairs = list(zip(variant.token_ids, other.token_ids, strict=True))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def sum_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of what engines did; flags and block counts are the last one's."""
    total = EngineStats()
    for part in parts:
        total = total.plus(part)
    return total


def summary(variant: Variant, plain: Variant) -> dict[str, Any]:
    """What a benchmark reports about a variant, as plain values."""
    stats = variant.stats
    steps = max(stats.num_steps, 1)
    return {
        "name": variant.name,
        "tokens_per_second": variant.median_rate,
        "tokens_per_second_per_round": [run.tokens_per_second for run in variant.runs],
        "ratio_of_medians": _ratio(variant.median_rate, plain.median_rate),
        "decode_tokens_per_second": variant.median_decode_rate,
        "decode_ratio_of_medians": _ratio(variant.median_decode_rate, plain.median_decode_rate),
        "acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "target_ms_per_step": 1000 * stats.target_seconds / steps,
        "verify_ms_per_step": 1000 * stats.verify_seconds / steps,
        "propose_ms_per_step": 1000 * stats.propose_seconds / steps,
        "rest_ms_per_step": 1000 * stats.rest_seconds / steps,
        "share_identical_to_plain": share_identical(variant, plain),
        "num_output_tokens": sum(run.num_tokens for run in variant.runs),
        "stats": stats.as_dict(),
    }


def _ratio(rate: float, other: float) -> float:
    return rate / other if other else 0.0


def progress(rounds: int, variants: Sequence[Variant], num_prompts: int, *, show: bool) -> _Progress:
    """A progress bar for `measure`; use it as a context manager and pass its ``advance``."""
    return _Progress(rounds * len(variants) * num_prompts, show=show)


def progress_bar(total: int, *, show: bool) -> _Progress:
    """A progress bar for ``total`` pieces of work; use it as a context manager and call ``one`` after each."""
    return _Progress(total, show=show)


class _Progress:
    """A bar on a terminal; elsewhere one line on standard error for each kind of work as it begins."""

    def __init__(self, total: int, *, show: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not show,
            transient=True,
        )
        self._task = self._bar.add_task("loading", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def one(self, description: str) -> None:
        """One more piece of work is done."""
        self._bar.update(self._task, advance=1, description=description)

    def advance(self, variant: Variant, num_prompts: int) -> None:
        """A batch is done."""
        self._bar.update(self._task, advance=num_prompts, description=variant.name)
