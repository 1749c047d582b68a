"""Measures what decides whether speculation pays: step time by rows, draft time, acceptance; and predicts the speed-up.

With p the share of steps that have a draft, D_i and A_i the parts of the drafts whose position i is drafted and
accepted, d(k) the draft time and v(n) the time of a step with n rows per request, k draft tokens give per step and
request

    1 + p (A_1 + ... + A_k)   tokens in   d(k) + (1 - p) v(1) + p v(1 + D_1 + ... + D_k)   seconds,

to be compared with one token in v(1) (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). Acceptance is
measured with the longest drafts. With shorter ones a larger part of the steps has a draft, since the same text takes
more of them: what stays the same is the part of the text that comes out of steps with a draft.

Of a tree, k is the number of its nodes, and i above is a depth. A tree with fewer nodes is another tree, whose
acceptance at each depth does not follow: k is then the measured one alone.

Some methods learn from finished requests, and would have seen the answers when a prompt is given again. So each engine
completes a prompt once at most; whatever else runs is aborted before its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, DraftLengthError
from specdec.metrics import EngineStats

if TYPE_CHECKING:
    from specdec.cli.filler import RepeatProposer
    from specdec.cli.prompts import Prompt
    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.frontend import Frontend
    from specdec.sampling.params import SamplingParams

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draft lengths whose step time is measured, as far as k allows, beside k itself."""
_STEPS = 8
"""Measured steps of one batch size and draft length in one round."""
_ATTEMPTS = 3
"""How often prompts are started in one round, where the texts end before all steps are measured."""
LEAST_GAIN = 1.03
"""Predicted speed-up from which speculation is recommended."""

Advance = Callable[[str], None]


@frozen(kw_only=True)
class StepTimes:
    """Median step time by draft length, for one batch size."""

    batch_size: int
    seconds: Mapping[int, float]
    """Draft tokens per request -> seconds of a step without drafting."""

    def at(self, k: float) -> float:
        """Seconds with ``k`` draft tokens, between measured lengths by interpolation."""
        below = max(length for length in self.seconds if length <= k)
        above = min((length for length in self.seconds if length >= k), default=below)
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
    """Part of the decoding steps that had a draft (p), with the longest drafts allowed."""
    acceptance: tuple[float, ...]
    """Accepted at draft position i, of trees at depth i / drafts (A_i)."""
    drafted: tuple[float, ...]
    """Drafted at draft position i, of trees at depth i / drafts (D_i)."""
    draft_seconds_first: float
    """Draft time of a step with one draft token allowed."""
    draft_seconds_last: float
    """The same with all of them allowed."""
    num_nodes: int | None = None
    """Most nodes of a draft, for a method that drafts trees; None for one that drafts chains."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Values of ``num_speculative_tokens`` for which something can be said."""
        if self.num_nodes is not None:
            return (self.num_nodes,) if self.acceptance else ()
        return tuple(range(1, len(self.acceptance) + 1))

    def named(self, k: int) -> str:
        """``k`` as reports call it."""
        return f"k={k}" if self.num_nodes is None else f"k={k} nodes"

    def share(self, k: int) -> float:
        """Part of the steps that have a draft of up to ``k`` tokens."""
        p = self.draft_share
        of_text = p * (1.0 + sum(self.acceptance))
        share_of_text = of_text / (of_text + 1.0 - p)
        steps_with = share_of_text / (1.0 + sum(self.acceptance[:k]))
        return steps_with / (steps_with + 1.0 - share_of_text)

    def tokens(self, k: int) -> float:
        """Tokens per step and request."""
        return 1.0 + self.share(k) * sum(self.acceptance[:k])

    def draft_seconds(self, k: int) -> float:
        """Draft time of a step, linear between the two measured lengths."""
        longest = max(self.lengths, default=1)
        share = (k - 1) / (longest - 1) if longest > 1 else 0.0
        return self.draft_seconds_first + share * (self.draft_seconds_last - self.draft_seconds_first)

    def step_seconds(self, k: int, times: StepTimes) -> float:
        """Time of a step without drafting, those without a draft included."""
        p = self.share(k)
        return (1.0 - p) * times.at(0) + p * times.at(sum(self.drafted[:k]))

    def speed_up(self, k: int, times: StepTimes) -> float:
        """Predicted speed relative to plain decoding."""
        return self.tokens(k) * times.at(0) / (self.draft_seconds(k) + self.step_seconds(k, times))

    def best(self, times: StepTimes) -> tuple[int, float]:
        """The k with the highest predicted speed-up, and that."""
        k = max(self.lengths, key=lambda k: self.speed_up(k, times), default=1)
        return k, self.speed_up(k, times)


@frozen(kw_only=True)
class Diagnosis:
    """Everything that was measured, and what follows."""

    step_times: tuple[StepTimes, ...]
    methods: tuple[MethodFacts, ...]
    incomplete: Mapping[str, str] = field(factory=dict)
    """Installed methods that were not tried because they need options, and which."""
    refused: Mapping[str, str] = field(factory=dict)
    """Methods that cannot serve the model, and why."""

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
        draft, rows = facts.draft_seconds(k) / plain, facts.step_seconds(k, times) / plain - 1.0
        return (
            f"at its best {facts.named(k)} a step gains {facts.tokens(k) - 1:.2f} tokens and takes "
            f"{draft + rows:.2f} of a plain step longer (drafting {draft:.2f}, more rows {rows:.2f}): {speed:.2f}x"
        )


def installed_methods(config: EngineConfig, k: int) -> tuple[list[SpeculativeConfig], dict[str, str]]:
    """The installed methods that need no options, or a checkpoint alone that an installed distribution brings for the
    model; and the others with the reason."""
    from specdec.errors import SpecdecError
    from specdec.registry import Registry

    registry = Registry(config.plugins)
    heads = registry.heads_for(config.model)
    usable, incomplete = list[SpeculativeConfig](), dict[str, str]()
    for name in dict.fromkeys(entry.name for entry in registry.entries() if entry.kind == "proposer" and entry.name):
        model = heads.get(name)
        try:
            registry.plugin_config("proposer", name, {} if model is None else {"model": model})
        except SpecdecError as error:
            incomplete[name] = str(error).partition("\n")[0]
        else:
            usable.append(SpeculativeConfig(method=name, model=model, num_speculative_tokens=k, speculation="always"))
    return usable, incomplete


def num_measured_steps(batch_sizes: Sequence[int], k: int, rounds: int) -> int:
    """How many steps `measure_step_times` measures."""
    return len(batch_sizes) * rounds * _STEPS * len(measured_lengths(k))


def measured_lengths(k: int) -> list[int]:
    """Draft lengths up to ``k`` whose step time is measured; ``k`` is one, so that nothing is asked beyond the last."""
    return sorted({length for length in LENGTHS if length <= k} | {k})


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
    """Step time by batch size and draft length; draft lengths take turns, step after step.

    Args:
        config: the engine's, without speculation.
        prompts: repeated to fill a batch.
        params: of every request.
        batch_sizes: requests at once.
        k: longest draft.
        rounds: how often a batch is decoded.
        advance: called after each step.

    Raises:
        ConfigError: the prompts leave no room for a decoding step.
    """
    from specdec.cli.filler import RepeatProposer
    from specdec.engine.frontend import Frontend

    if max(batch_sizes) > config.max_num_seqs:
        raise ConfigError(
            f"max_num_seqs is {config.max_num_seqs}, fewer than the {max(batch_sizes)} requests to be decoded at once",
            path="max_num_seqs",
        )
    speculative = SpeculativeConfig(method="repeat", num_speculative_tokens=k, speculation="always")
    filler = RepeatProposer()
    engine = Frontend(attrs.evolve(config, speculative=speculative), filler)
    lengths = measured_lengths(k)
    found = []
    try:
        inputs = _inputs(engine, prompts)
        for batch_size in batch_sizes:
            batch = [inputs[i % len(inputs)] for i in range(batch_size)]
            seconds: dict[int, list[float]] = {length: [] for length in lengths}
            for turn in range(1, rounds + 1):
                for _ in range(_ATTEMPTS):
                    with _muted("specdec.runner.drafting"):  # which says that the filler's drafts are wrong
                        _decode_steps(engine, filler, batch, params, seconds, turn * _STEPS, advance)
            found.append(_step_times(batch_size, seconds, engine.core.parts.context.max_model_len))
    finally:
        engine.close()
    return tuple(found)


@contextmanager
def _muted(name: str) -> Iterator[None]:
    """Keep warnings of a logger back, but no errors."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _decode_steps(
    engine: Frontend,
    filler: RepeatProposer,
    prompts: Sequence[Any],
    params: SamplingParams,
    seconds: Mapping[int, list[float]],
    wanted: int,
    advance: Advance,
) -> None:
    """Add seconds of steps in which all requests decode, until there are ``wanted`` of each draft length."""
    if all(len(times) >= wanted for times in seconds.values()):
        return
    endless = attrs.evolve(params, max_tokens=None, min_tokens=0, ignore_eos=True)
    groups = [engine.prepare(prompt, endless, None) for prompt in prompts]
    for group in groups:
        engine.submit(group)
    turns = cycle(seconds)
    skip = 2  # the first steps after prompts are not like the others
    while len(engine.groups) == len(groups) and any(len(times) < wanted for times in seconds.values()):
        before = engine.stats()
        filler.length = next(turns)  # of the next step
        engine.step()
        step = engine.stats().since(before)
        length, rest = divmod(step.num_draft_tokens, len(groups))
        found = seconds.get(length)
        all_decoded = step.num_generated_tokens >= len(groups) and step.num_drafts in (0, len(groups))
        if step.num_prompt_tokens or rest or found is None or not all_decoded:
            continue
        if skip:
            skip -= 1
        elif len(found) < wanted:
            found.append(step.step_seconds - step.propose_seconds)
            advance(f"steps, batch {len(groups)}")
    for group in groups:
        engine.abort(group.request_id)


def _step_times(batch_size: int, seconds: Mapping[int, list[float]], max_model_len: int) -> StepTimes:
    """The medians of what was measured."""
    found = {length: median(times) for length, times in seconds.items() if times}
    if 0 not in found:
        raise ConfigError(
            f"max_model_len is {max_model_len}: the prompts leave no room in it, or kv_cache_memory none beside them, "
            f"for {batch_size} requests that decode at once; raise them, or give shorter prompts or fewer requests",
            path="max_model_len",
        )
    return StepTimes(batch_size=batch_size, seconds=found)


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


def measure_method(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    advance: Advance,
    proposer: Proposer | None = None,
) -> MethodFacts:
    """Draft time and acceptance of one method, one request at a time, with drafts as long as it can make them.

    Raises:
        SpecdecError: the method cannot serve this model.
    """
    from specdec.engine.frontend import Frontend

    always = attrs.evolve(speculative, speculation="always")
    name = speculative.method or str(speculative.model)
    try:
        engine = Frontend(attrs.evolve(config, speculative=always), proposer)
    except DraftLengthError as error:
        always = attrs.evolve(always, num_speculative_tokens=error.most)
        engine = Frontend(attrs.evolve(config, speculative=always), proposer)
    assert engine.config.speculative is not None
    k = engine.config.speculative.most_draft_tokens
    drafting = engine.core.parts.drafting
    trees = drafting is not None and drafting.proposer.capabilities.trees
    try:
        inputs = _inputs(engine, prompts)
        _decode(engine, inputs[0], params, k, stop_after=8)
        advance(name)
        first = _decode(engine, inputs[0], params, 1, stop_after=params.max_tokens or 64)
        advance(name)
        total = EngineStats()
        for prompt in inputs:
            total = total.plus(_decode(engine, prompt, params, k))
            advance(name)
    finally:
        engine.close()
    drafts = max(total.num_drafts, 1)
    return MethodFacts(
        name=name,
        speculative=always,
        draft_share=total.num_drafts / max(total.num_steps, 1),
        acceptance=total.acceptance_rate_per_pos if total.num_drafts else (),
        drafted=tuple([number / drafts for number in total.num_draft_tokens_per_pos]),
        draft_seconds_first=first.propose_seconds / max(first.num_steps, 1),
        draft_seconds_last=total.propose_seconds / max(total.num_steps, 1),
        num_nodes=k if trees else None,
    )


def _decode(
    engine: Frontend, prompt: Any, params: SamplingParams, k: int, stop_after: int | None = None
) -> EngineStats:
    """What the engine did in the steps that decode one prompt.

    Args:
        engine: runs nothing else.
        prompt: as the engine takes it.
        params: of the request.
        k: longest draft.
        stop_after: abort after so many tokens, so that a method that learns from answers learns nothing.
    """
    if stop_after is not None:
        params = attrs.evolve(params, max_tokens=None, min_tokens=0, ignore_eos=True)
    group = engine.prepare(prompt, params, None, speculation={"num_speculative_tokens": k})
    engine.submit(group)
    total = EngineStats()
    while not group.is_finished:
        before = engine.stats()
        engine.step()
        step = engine.stats().since(before)
        if not step.num_prompt_tokens:
            total = total.plus(step)
        if stop_after is not None and group.requests[0].num_output_tokens >= stop_after:
            engine.abort(group.request_id)
    return total
