"""What happened in one step, and the sum since an engine started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs
from attrs import field, frozen

from specdec.draft_trees import node_depths
from specdec.types import SpecStats


@frozen(kw_only=True)
class SpecDecodingStats(SpecStats):
    """The speculation of one step: the counts of `SpecStats`, and where the step's time went."""

    propose_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0


@frozen(kw_only=True)
class StepStats:
    """One step of the engine, as statistics loggers see it. Counts are of this step alone."""

    num_requests: int = 0
    """Requests that were scheduled."""
    num_tokens: int = 0
    """Tokens that went through the target, draft tokens included."""
    num_prompt_tokens: int = 0
    """Of these, tokens of prompts."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache and so not computed."""
    num_generated_tokens: int = 0
    """Tokens committed to outputs."""
    num_drafts: int = 0
    """Requests whose draft was verified."""
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens verified at each draft position; of trees at each depth."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens kept at each draft position; of trees at each depth."""
    num_grammar_forced_tokens: int = 0
    """Tokens added behind drafts because a grammar left one continuation, verified; not counted as draft tokens."""
    num_grammar_accepted_tokens: int = 0
    """Of these, tokens kept."""
    propose_seconds: float = 0.0
    """Making the drafts for the next step."""
    target_seconds: float = 0.0
    """The target's forward pass."""
    verify_seconds: float = 0.0
    """Processing logits, sampling and verification."""
    rest_seconds: float = 0.0
    """Scheduling, batch preparation, commit."""
    num_preemptions: int = 0
    """Requests that gave up their blocks in this step."""
    num_running: int = 0
    """Requests that hold KV blocks after the step."""
    num_waiting: int = 0
    """Requests that wait after the step."""
    kv_usage: float = 0.0
    """Part of the KV blocks in use, 0 to 1."""
    first_token_seconds: tuple[float, ...] = ()
    """Of requests whose first token came in this step: time since their arrival."""
    inter_token_seconds: tuple[float, ...] = ()
    """Of other requests that emitted tokens: time since they last did."""
    grammar_seconds: float = 0.0
    """Following grammars: draft tokens cut and added, masks, commits. Part of the times of the stages."""
    speculation_paused: bool = False
    """Whether drafting is suspended after the step because it does not pay."""
    current_draft_tokens: int = 0
    """The most draft tokens that a request may have in the next step."""

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens kept."""
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.propose_seconds + self.target_seconds + self.verify_seconds + self.rest_seconds

    @property
    def spec(self) -> SpecDecodingStats:
        """The step's speculation."""
        return SpecDecodingStats(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_tokens_per_pos=self.num_accepted_tokens_per_pos,
            num_draft_tokens_per_pos=self.num_draft_tokens_per_pos,
            num_grammar_forced_tokens=self.num_grammar_forced_tokens,
            num_grammar_accepted_tokens=self.num_grammar_accepted_tokens,
            propose_seconds=self.propose_seconds,
            target_seconds=self.target_seconds,
            verify_seconds=self.verify_seconds,
            rest_seconds=self.rest_seconds,
        )


@frozen(kw_only=True)
class RequestStats:
    """One sequence (each of the ``n`` choices of a request is one) that has ended."""

    finish_reason: str
    """'stop', 'length', 'abort' or 'error'."""
    request_id: str = ""
    """The request's id, with ``#`` and the number of the choice when it asked for several."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt."""
    num_output_tokens: int = 0
    """Tokens of the output."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_preemptions: int = 0
    """How often the request was preempted."""
    queued_seconds: float | None = None
    """From arrival until first scheduled; None when it never was."""
    first_token_seconds: float | None = None
    """From arrival until the first token; None when there was none."""
    total_seconds: float = 0.0
    """From arrival until the end."""
    spec: SpecStats = field(factory=SpecStats)
    """Its speculation."""

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.first_token_seconds is None or self.num_output_tokens < 2:
            return None
        return (self.total_seconds - self.first_token_seconds) / (self.num_output_tokens - 1)


@frozen(kw_only=True)
class EngineStats:
    """Totals since the engine started. Rates are 0 and lengths 1 when nothing was drafted; never NaN."""

    num_steps: int = 0
    """Steps of the engine."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed, those of preempted requests each time they are computed again."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    num_generated_tokens: int = 0
    """Tokens committed to outputs; what a stop or limit cut off is not counted."""
    num_preemptions: int = 0
    """Requests that gave up their blocks and began again."""
    num_drafts: int = 0
    """Drafts that were verified; one request in one step has at most one."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_tokens: int = 0
    """Draft tokens kept."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens kept at each draft position; of trees at each depth."""
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens verified at each draft position; of trees at each depth."""
    propose_seconds: float = 0.0
    """Making drafts."""
    target_seconds: float = 0.0
    """The target's forward passes."""
    verify_seconds: float = 0.0
    """Processing logits, sampling and verification."""
    rest_seconds: float = 0.0
    """Scheduling, batch preparation, commit."""
    grammar_seconds: float = 0.0
    """Following grammars; part of the times of the stages."""
    num_grammar_cut_tokens: int = 0
    """Draft tokens that grammars refused before they were scheduled; they do not count as drafted."""
    num_grammar_forced_tokens: int = 0
    """Tokens added behind drafts because a grammar left one continuation, verified; they do not count as drafted or
    accepted."""
    num_grammar_accepted_tokens: int = 0
    """Of these, tokens kept."""
    lossless: bool = True
    """Whether the verifier keeps the target's distribution."""
    num_proposer_faults: int = 0
    """Drafts that failed: the proposer raised, broke its contract or was too slow."""
    speculation_disabled: bool = False
    """Whether the proposer was switched off after too many faults in a row."""
    speculation_paused: bool = False
    """Whether drafting is suspended at the moment because it does not pay (``speculation = "auto"``)."""
    current_draft_tokens: int = 0
    """The most draft tokens that a request could have in the latest step."""
    proposer: Mapping[str, Any] = field(factory=dict)
    """What the proposer counts itself since its start (`Proposer.stats`)."""
    proposer_memory: Mapping[str, int] = field(factory=dict)
    """Bytes the proposer holds, by purpose (`Proposer.memory`)."""
    free_blocks: int = 0
    """KV blocks that no request holds; prefix-cached ones count as free."""
    total_blocks: int = 0
    """KV blocks in all."""
    num_running: int = 0
    """Requests that hold KV blocks now."""
    num_waiting: int = 0
    """Requests that wait now."""

    @property
    def spec(self) -> SpecStats:
        """The speculation alone."""
        return SpecStats(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_tokens_per_pos=self.num_accepted_tokens_per_pos,
            num_draft_tokens_per_pos=self.num_draft_tokens_per_pos,
            num_grammar_forced_tokens=self.num_grammar_forced_tokens,
            num_grammar_accepted_tokens=self.num_grammar_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.spec.acceptance_rate

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per verified draft, the recovered or bonus token included."""
        return self.spec.mean_acceptance_length

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Accepted at draft position i / drafts."""
        return self.spec.acceptance_rate_per_pos

    @property
    def step_seconds(self) -> float:
        """Wall time of all steps."""
        return self.propose_seconds + self.target_seconds + self.verify_seconds + self.rest_seconds

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks in use, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates as plain values, for JSON."""
        plain = attrs.asdict(self)
        for name in ("acceptance_rate", "mean_acceptance_length", "acceptance_rate_per_pos", "kv_usage"):
            plain[name] = getattr(self, name)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was added after ``earlier``; flags and block counts are those of now."""
        return self._combined(earlier, -1, state=self)

    def plus(self, later: EngineStats) -> EngineStats:
        """The sum of two periods; flags and block counts are the later one's."""
        return self._combined(later, 1, state=later)

    def _combined(self, other: EngineStats, sign: int, state: EngineStats) -> EngineStats:
        counts = [f.name for f in attrs.fields(EngineStats) if f.name not in _STATES]
        summed = {name: _add(getattr(self, name), getattr(other, name), sign) for name in counts}
        return attrs.evolve(state, **summed)


_STATES = (
    "lossless",
    "speculation_disabled",
    "speculation_paused",
    "current_draft_tokens",
    "proposer",
    "proposer_memory",
    "free_blocks",
    "total_blocks",
    "num_running",
    "num_waiting",
)
"""Fields of `EngineStats` that say how things are, not how often something happened."""


def _add(one: Any, other: Any, sign: int) -> Any:
    if not isinstance(one, tuple):
        return one + sign * other
    return tuple(a + sign * b for a, b in zip_longest(one, other, fillvalue=0))


class SpecCounter:
    """Counts drafts and what was kept of them: for a request, a step, or an engine."""

    __slots__ = ("accepted_per_pos", "drafted_per_pos", "num_drafts", "num_forced", "num_forced_accepted")

    def __init__(self) -> None:
        self.num_drafts = 0
        self.drafted_per_pos: list[int] = []
        self.accepted_per_pos: list[int] = []
        self.num_forced = self.num_forced_accepted = 0

    def count(self, drafted: int, accepted: int, parents: Sequence[int] | None = None) -> None:
        """Count one draft.

        Args:
            drafted: its tokens; 0 are no draft.
            accepted: how many were kept; of a tree the length of the accepted path.
            parents: of a tree, as in `specdec.types.Draft`, for each token; its positions are depths. None: a chain.
        """
        if drafted <= 0:
            return
        self.num_drafts += 1
        per_position = [1] * drafted if parents is None else _per_depth(parents)
        _add_into(self.drafted_per_pos, per_position)
        _extend(self.accepted_per_pos, len(per_position))
        for position in range(accepted):
            self.accepted_per_pos[position] += 1

    def count_forced(self, verified: int, accepted: int) -> None:
        """Count tokens that a grammar forced, and how many of them were kept."""
        self.num_forced += verified
        self.num_forced_accepted += accepted

    def add(self, num_drafts: int, drafted_per_pos: Sequence[int], accepted_per_pos: Sequence[int]) -> None:
        """Add counts that were taken elsewhere."""
        self.num_drafts += num_drafts
        _add_into(self.drafted_per_pos, drafted_per_pos)
        _add_into(self.accepted_per_pos, accepted_per_pos)

    def add_stats(self, stats: SpecStats) -> None:
        """Add the counts of a request."""
        self.add(stats.num_drafts, stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos)
        self.count_forced(stats.num_grammar_forced_tokens, stats.num_grammar_accepted_tokens)

    def snapshot(self) -> SpecStats:
        """The counts so far."""
        return SpecStats(
            num_drafts=self.num_drafts,
            num_draft_tokens=sum(self.drafted_per_pos),
            num_accepted_tokens=sum(self.accepted_per_pos),
            num_accepted_tokens_per_pos=tuple(self.accepted_per_pos),
            num_draft_tokens_per_pos=tuple(self.drafted_per_pos),
            num_grammar_forced_tokens=self.num_forced,
            num_grammar_accepted_tokens=self.num_forced_accepted,
        )


def _per_depth(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree at each depth; parents come before children."""
    depths = node_depths(parents)
    counts = [0] * max(depths)
    for depth in depths:
        counts[depth - 1] += 1
    return counts


def _extend(counts: list[int], length: int) -> None:
    if len(counts) < length:
        counts.extend([0] * (length - len(counts)))


def _add_into(counts: list[int], more: Sequence[int]) -> None:
    _extend(counts, len(more))
    for position, number in enumerate(more):
        counts[position] += number


class StatsAccumulator:
    """Sums the steps of an engine; adding one costs a few microseconds."""

    def __init__(self) -> None:
        self._spec = SpecCounter()
        self._num_steps = self._prompt = self._cached = self._generated = self._preemptions = 0
        self._propose = self._target = self._verify = self._rest = self._grammar = 0.0

    def add(self, step: StepStats) -> None:
        """Add one step."""
        self._num_steps += 1
        self._prompt += step.num_prompt_tokens
        self._cached += step.num_cached_tokens
        self._generated += step.num_generated_tokens
        self._preemptions += step.num_preemptions
        self._propose += step.propose_seconds
        self._target += step.target_seconds
        self._verify += step.verify_seconds
        self._rest += step.rest_seconds
        self._grammar += step.grammar_seconds
        if step.num_drafts:
            self._spec.add(step.num_drafts, step.num_draft_tokens_per_pos, step.num_accepted_tokens_per_pos)
        self._spec.count_forced(step.num_grammar_forced_tokens, step.num_grammar_accepted_tokens)

    def engine_stats(
        self,
        *,
        free_blocks: int = 0,
        total_blocks: int = 0,
        lossless: bool = True,
        num_proposer_faults: int = 0,
        speculation_disabled: bool = False,
        speculation_paused: bool = False,
        current_draft_tokens: int = 0,
        proposer: Mapping[str, Any] | None = None,
        proposer_memory: Mapping[str, int] | None = None,
        num_running: int = 0,
        num_waiting: int = 0,
        num_grammar_cut_tokens: int = 0,
    ) -> EngineStats:
        """The sums so far, with the engine's present state."""
        spec = self._spec.snapshot()
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens=self._prompt,
            num_cached_tokens=self._cached,
            num_generated_tokens=self._generated,
            num_preemptions=self._preemptions,
            num_drafts=spec.num_drafts,
            num_draft_tokens=spec.num_draft_tokens,
            num_accepted_tokens=spec.num_accepted_tokens,
            num_accepted_tokens_per_pos=spec.num_accepted_tokens_per_pos,
            num_draft_tokens_per_pos=spec.num_draft_tokens_per_pos,
            propose_seconds=self._propose,
            target_seconds=self._target,
            verify_seconds=self._verify,
            rest_seconds=self._rest,
            grammar_seconds=self._grammar,
            num_grammar_cut_tokens=num_grammar_cut_tokens,
            num_grammar_forced_tokens=spec.num_grammar_forced_tokens,
            num_grammar_accepted_tokens=spec.num_grammar_accepted_tokens,
            num_proposer_faults=num_proposer_faults,
            speculation_disabled=speculation_disabled,
            lossless=lossless,
            speculation_paused=speculation_paused,
            current_draft_tokens=current_draft_tokens,
            proposer=proposer or {},
            proposer_memory=proposer_memory or {},
            free_blocks=free_blocks,
            total_blocks=total_blocks,
            num_running=num_running,
            num_waiting=num_waiting,
        )
