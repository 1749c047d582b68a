"""Measures what decides whether speculation pays: step time by rows, draft time, acceptance; and predicts the speed-up.

With p the share of steps that have a draft, A_i the probability that draft position i is accepted, d(k) the draft time
and v(n) the time of a step with n rows per request, k draft tokens give per step and request

    1 + p (A_1 + ... + A_k)   tokens in   d(k) + (1 - p) v(1) + p v(k + 1)   seconds,

to be compared with one token in v(1) (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from specdec.config import SpeculativeConfig

if TYPE_CHECKING:
    from specdec.cli.prompts import Prompt
    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.frontend import Frontend
    from specdec.metrics import EngineStats
    from specdec.sampling.params import SamplingParams

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths whose step time is measured, as far as k allows."""
_STEPS = 8
"""Measured steps of one batch size and draft length in one round."""
LEAST_GAIN = 1.03
"""Predicted speed-up from which speculation is recommended."""

Advance = Callable[[str], None]


@frozen(kw_only=True)
class StepTimes:
    """Median step time by draft length, for one batch size."""

    batch_size: int
    seconds: Mapping[int, float]
    """Draft tokens per request -> seconds of a step without drafting."""

    def at(self, k: int) -> float:
        """Seconds with ``k`` draft tokens, between measured lengths by interpolation."""
        if k in self.seconds:
            return self.seconds[k]
        below = max(length for length in self.seconds if length < k)
        above = min((length for length in self.seconds if length > k), default=below)
        if above == below:
            return self.seconds[below]
        share = (k - below) / (above - below)
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])


@frozen(kw_only=True)
class MethodFacts:
    """What one method did on the prompts, one request at a time."""

    name: str
    speculative: SpeculativeConfig
    draft_share: float
    """Part of the steps that had a draft (p)."""
    acceptance: tuple[float, ...]
    """Accepted at draft position i / drafts (A_i)."""
    draft_seconds_first: float
    """Draft time of a step with one draft token allowed."""
    draft_seconds_last: float
    """The same with all of them allowed."""

    def tokens(self, k: int) -> float:
        """Tokens per step and request."""
        return 1.0 + self.draft_share * sum(self.acceptance[:k])

    def draft_seconds(self, k: int) -> float:
        """Draft time of a step, linear between the two measured lengths."""
        longest = max(len(self.acceptance), 1)
        share = (k - 1) / (longest - 1) if longest > 1 else 0.0
        return self.draft_seconds_first + share * (self.draft_seconds_last - self.draft_seconds_first)

    def speed_up(self, k: int, times: StepTimes) -> float:
        """Predicted speed relative to plain decoding."""
        p = self.draft_share
        seconds = self.draft_seconds(k) + (1.0 - p) * times.at(0) + p * times.at(k)
        return self.tokens(k) * times.at(0) / seconds

    def best(self, times: StepTimes) -> tuple[int, float]:
        """The k with the highest predicted speed-up, and that."""
        k = max(range(1, len(self.acceptance) + 1), key=lambda k: self.speed_up(k, times), default=1)
        return k, self.speed_up(k, times)


@frozen(kw_only=True)
class Diagnosis:
    """Everything that was measured, and what follows."""

    step_times: tuple[StepTimes, ...]
    methods: tuple[MethodFacts, ...]
    skipped: Mapping[str, str] = field(factory=dict)
    """Methods that were not tried, and why."""

    def recommended(self, batch_size: int) -> tuple[MethodFacts, int, float] | None:
        """Method, k and predicted speed-up for a measured batch size; None when nothing pays."""
        times = next(times for times in self.step_times if times.batch_size == batch_size)
        found = [(facts, *facts.best(times)) for facts in self.methods if facts.acceptance]
        best = max(found, key=lambda one: one[2], default=None)
        return best if best is not None and best[2] >= LEAST_GAIN else None

    def why_not(self, facts: MethodFacts, times: StepTimes) -> str:
        """Why a method does not pay, in numbers."""
        if not facts.draft_share or not facts.acceptance:
            return "it found nothing to draft on these prompts"
        k, speed = facts.best(times)
        plain = times.at(0)
        draft, rows = facts.draft_seconds(k) / plain, facts.draft_share * (times.at(k) - plain) / plain
        return (
            f"at its best k={k} a step gains {facts.tokens(k) - 1:.2f} tokens and takes {draft + rows:.2f} of a plain "
            f"step longer (drafting {draft:.2f}, more rows {rows:.2f}): {speed:.2f}x"
        )


def methods_without_checkpoint(config: EngineConfig, k: int) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """The installed methods that need no options, and the others with the reason."""
    from specdec.errors import SpecdecError
    from specdec.registry import Registry

    registry = Registry(config.plugins)
    usable, skipped = list[SpeculativeConfig](), dict[str, str]()
    for name in dict.fromkeys(entry.name for entry in registry.entries() if entry.kind == "proposer" and entry.name):
        try:
            registry.plugin_config("proposer", name, {})
        except SpecdecError as error:
            skipped[name] = str(error).partition("\n")[0]
        else:
            usable.append(SpeculativeConfig(method=name, num_speculative_tokens=k, speculation="always"))
    return usable, skipped


def measure_step_times(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    batch_sizes: Sequence[int],
    k: int,
    rounds: int,
    advance: Advance,
) -> tuple[StepTimes, ...]:
    """Step time by batch size and draft length; draft lengths take turns, round after round.

    Args:
        config: the engine's, without speculation.
        prompts: repeated to fill a batch.
        params: of every request.
        batch_sizes: requests at once.
        k: longest draft.
        rounds: turns of each draft length.
        advance: called after each turn.
    """
    from specdec.cli.filler import RepeatProposer
    from specdec.engine.frontend import Frontend

    speculative = SpeculativeConfig(method="repeat", num_speculative_tokens=k, speculation="always")
    engine = Frontend(attrs.evolve(config, speculative=speculative), RepeatProposer())
    lengths = [length for length in LENGTHS if length <= k]
    found = []
    try:
        inputs = _inputs(engine, prompts)
        for batch_size in batch_sizes:
            seconds: dict[int, list[float]] = {length: [] for length in lengths}
            for _ in range(rounds):
                for length in lengths:
                    batch = [inputs[i % len(inputs)] for i in range(batch_size)]
                    seconds[length] += _decode_steps(engine, batch, params, length)
                    advance(f"steps, batch {batch_size}")
            found.append(
                StepTimes(batch_size=batch_size, seconds={length: median(times) for length, times in seconds.items()})
            )
    finally:
        engine.close()
    return tuple(found)


@frozen
class _Templates:
    """As much of an engine as prompts need for the chat template."""

    config: EngineConfig
    tokenizer: Any

    def get_tokenizer(self) -> Any:
        return self.tokenizer


def _inputs(engine: Frontend, prompts: Sequence[Prompt]) -> list[Any]:
    templates = _Templates(engine.config, engine.tokenizer)
    return [prompt.for_engine(templates) for prompt in prompts]


def _decode_steps(engine: Frontend, prompts: Sequence[Any], params: SamplingParams, k: int) -> list[float]:
    """Seconds of some steps in which all requests decode with ``k`` draft tokens."""
    long = attrs.evolve(params, max_tokens=(_STEPS + 4) * (k + 1), ignore_eos=True)
    groups = [engine.prepare(prompt, long, None, speculation={"num_speculative_tokens": k}) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    found: list[float] = []
    skip = 2  # the first steps after a prefill have no draft yet
    while len(found) < _STEPS and engine.core.has_work:
        before = engine.stats()
        engine.step()
        step = engine.stats().since(before)
        if step.num_prompt_tokens or step.num_drafts < (len(prompts) if k else 0):
            continue
        if skip:
            skip -= 1
            continue
        found.append(step.step_seconds - step.propose_seconds)
    for group in groups:
        engine.abort(group.request_id)
    return found or [float("nan")]


def measure_method(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    advance: Advance,
    proposer: Proposer | None = None,
) -> MethodFacts:
    """Draft time and acceptance of one method, one request at a time.

    Raises:
        SpecdecError: the method cannot serve this model.
    """
    from specdec.engine.frontend import Frontend

    always = attrs.evolve(speculative, speculation="always")
    name = speculative.method or str(speculative.model)
    engine = Frontend(attrs.evolve(config, speculative=always), proposer)
    try:
        inputs = _inputs(engine, prompts)
        _generate(engine, inputs[0], attrs.evolve(params, max_tokens=8), always.num_speculative_tokens)
        first = _generate(engine, inputs[0], params, 1)
        total = None
        for prompt in inputs:
            stats = _generate(engine, prompt, params, always.num_speculative_tokens)
            total = stats if total is None else total.plus(stats)
            advance(name)
    finally:
        engine.close()
    assert total is not None
    return MethodFacts(
        name=name,
        speculative=always,
        draft_share=total.num_drafts / max(total.num_steps, 1),
        acceptance=total.acceptance_rate_per_pos if total.num_drafts else (),
        draft_seconds_first=first.propose_seconds / max(first.num_steps, 1),
        draft_seconds_last=total.propose_seconds / max(total.num_steps, 1),
    )


def _generate(engine: Frontend, prompt: Any, params: SamplingParams, k: int) -> EngineStats:
    """What the engine did for one prompt."""
    before = engine.stats()
    group = engine.prepare(prompt, params, None, speculation={"num_speculative_tokens": k})
    engine.submit(group)
    while not group.is_finished:
        engine.step()
    return engine.stats().since(before)
