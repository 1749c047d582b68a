"""Applies a verdict: the only place where tokens become part of a request.

Each request's run of tokens is looked at token by token, as if they had come from separate steps: stops and limits cut
it, and what is cut never existed for text, log-probabilities, prefix cache or statistics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from attrs import define, field

from specdec.engine.request import NO_DRAFT
from specdec.errors import RequestFailedError
from specdec.metrics.stats import SpecCounter
from specdec.outputs import BONUS, FORCED, PLAIN, RECOVERED
from specdec.runner.verdict_check import check_form, check_runs
from specdec.sampling.outcome import failure_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.attention.interface import KVCache
    from specdec.engine.kv_cache import KVCacheManager
    from specdec.engine.plan import ScheduledRequest
    from specdec.engine.request import Request, RequestDraft
    from specdec.grammar.state import RequestGrammar
    from specdec.runner.batch import StepBatch
    from specdec.sampling.logprobs import LogprobsComputer
    from specdec.sampling.params import SamplingParams
    from specdec.types import TargetOutput, Verdict


class Outcome(NamedTuple):
    """What became of a request's draft."""

    request: Request
    drafted: int
    """The proposer's draft tokens that were verified."""
    accepted_nodes: Sequence[int]
    """Which of them were kept, as indices into the draft: the first ones of a chain, a tree's accepted path."""
    parents: Sequence[int] | None
    """Of a tree's nodes, as in `specdec.types.Draft`; None for a chain."""


@define(eq=False)
class Committed:
    """What a commit changed, for outputs and statistics."""

    advanced: list[Request] = field(factory=list)
    """Requests that emitted tokens or failed."""
    num_generated_tokens: int = 0
    spec: SpecCounter = field(factory=SpecCounter)
    outcomes: list[Outcome] = field(factory=list)
    """Of each draft of the step."""


class Committer:
    """Turns verdicts into committed tokens."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        logprobs: LogprobsComputer,
        slots: KVCache,
        faults: Mapping[str, Exception] | None = None,
        processors_of: Callable[[SamplingParams], Sequence[str]] = lambda params: (),
        verifier: str = "verifier",
    ) -> None:
        """Make a committer.

        Args:
            kv_cache: the blocks of the requests.
            logprobs: adds log-probabilities to them.
            slots: the K/V, to move that of accepted tree paths.
            faults: why requests of the step cannot go on, by id (`LogitsPipeline.faults`).
            processors_of: names the logits processors that apply to a request (`LogitsPipeline.processors_of`).
            verifier: what gives the verdicts, with its distribution and version, for messages.
        """
        self.grammar_seconds = 0.0
        """Time spent advancing grammars since the engine started."""
        self._faults = {} if faults is None else faults
        self._processors_of = processors_of
        self._kv_cache = kv_cache
        self._logprobs = logprobs
        self._slots = slots
        self._verifier = verifier

    def commit(self, step: StepBatch, target: TargetOutput, processed: torch.Tensor, verdict: Verdict) -> Committed:
        """Advance the step's requests. A finished request keeps its blocks until the engine releases them.

        Args:
            step: the batch that was run.
            target: its raw logits.
            processed: float [R, V], the rows the verifier saw.
            verdict: the verifier's decision; the one copy from device to host of the step happens here.

        Raises:
            PluginContractError: the verdict is none; nothing has been changed.
        """
        check_form(verdict, self._verifier)
        runs, counts = verdict.token_ids.tolist(), verdict.num_tokens.tolist()
        drafted = [len(share.draft) for share in step.sampling]
        check_runs(runs, counts, drafted, processed.shape[1], self._verifier)
        committed = Committed()
        for share in step.scheduled:
            share.request.num_computed_tokens = share.num_computed_tokens + share.num_tokens - len(share.draft)
            share.request.draft = NO_DRAFT
        for prompt_rows in step.prompt_rows:
            self._logprobs.add_prompt(prompt_rows.request, target.logits, prompt_rows.first_row, prompt_rows.token_ids)
        if verdict.accepted_nodes is not None:
            _compact_accepted_paths(step, verdict.accepted_nodes, self._slots)
        paths = [None] * len(runs) if verdict.accepted_nodes is None else verdict.accepted_nodes.tolist()
        kept = [
            self._advance(share, run[:count], path, committed)
            for share, run, count, path in zip(step.sampling, runs, counts, paths, strict=True)
        ]
        self._add_logprobs(step, target, processed, verdict, kept)
        for share in step.scheduled:
            self._kv_cache.cache_full_blocks(share.request)
        return committed

    def _advance(self, share: ScheduledRequest, run: list[int], path: list[int] | None, committed: Committed) -> int:
        """Commit a request's run; return how many tokens were kept. ``path`` is a tree's accepted nodes, padded."""
        request = share.request
        now = time.monotonic()
        committed.advanced.append(request)
        num_drafted_kept = len(run) - 1
        fault = self._faults.get(request.request_id)
        ended = False
        if fault is None and request.grammar is not None:
            run, ended, fault = self._follow_grammar(request.grammar, run)
        if fault is not None or run[-1] < 0:
            request.finish_reason = "error"
            cause = str(fault) if fault is not None else self._no_token(run[-1], request)
            request.error = RequestFailedError(f"request {request.request_id!r} failed; others go on. {cause}")
            request.error.__cause__ = fault
            return 0
        decision = request.stop_checker.check(run, ended=ended)
        num_kept = decision.num_tokens
        num_accepted = min(num_drafted_kept, num_kept)
        num_kept_drafted = _count_draft(request, share.draft, num_accepted, path, committed)
        request.num_computed_tokens += num_accepted
        request.append(run[:num_kept])
        request.token_origins.extend(range(num_kept_drafted))
        request.token_origins.extend([FORCED] * (num_accepted - num_kept_drafted))
        if num_kept > num_accepted:  # the one token that the target chose itself
            request.token_origins.append(_origin(share.draft, num_accepted, path))
        request.text += decision.text
        request.finish_reason = decision.finish_reason
        request.stop_reason = decision.stop_reason
        if request.timings.first_token is None:
            request.timings.first_token = now
        committed.num_generated_tokens += num_kept
        return num_kept

    def _no_token(self, code: int, request: Request) -> str:
        return failure_message(code, request.params, self._processors_of(request.params))

    def _follow_grammar(self, grammar: RequestGrammar, run: list[int]) -> tuple[list[int], bool, Exception | None]:
        """The part of a run up to the end of the grammar, whether that is in it, and what went wrong."""
        begin = time.perf_counter()
        try:
            return run[: grammar.advance(run)], grammar.is_terminated, None
        except Exception as error:
            return run, False, error
        finally:
            self.grammar_seconds += time.perf_counter() - begin

    def _add_logprobs(
        self, step: StepBatch, target: TargetOutput, processed: torch.Tensor, verdict: Verdict, kept: Sequence[int]
    ) -> None:
        wanted = [i for i, share in enumerate(step.sampling) if share.request.logprobs is not None and kept[i]]
        if not wanted:
            return
        row_start = step.layout.row_start.tolist()
        nodes = None if verdict.accepted_nodes is None else verdict.accepted_nodes.tolist()
        rows: list[int] = []
        tokens: list[int] = []
        for i in wanted:
            path = range(kept[i]) if nodes is None else [0, *(node + 1 for node in nodes[i][: kept[i] - 1])]
            rows.extend(row_start[i] + step_in_path for step_in_path in path)
            tokens.extend(step.sampling[i].request.token_ids[-kept[i] :].tolist())
        counts = [(step.sampling[i].request, kept[i]) for i in wanted]
        self._logprobs.add_output(counts, target.logits, processed, np.array(rows), np.array(tokens))


def _count_draft(
    request: Request, draft: RequestDraft, num_accepted: int, path: list[int] | None, committed: Committed
) -> int:
    """Count a draft of which the first ``num_accepted`` tokens were kept; return how many of these were proposed.

    What the grammar forced says nothing about the proposer and is counted apart.
    """
    drafted, parents = draft.num_proposed, draft.parents  # nothing is forced behind a tree
    accepted = min(num_accepted, drafted)
    for counter in (request.spec, committed.spec):
        counter.count(drafted, accepted, parents)
        counter.count_forced(draft.num_forced, num_accepted - accepted)
    if drafted:
        nodes = range(accepted) if path is None else path[:accepted]
        committed.outcomes.append(Outcome(request, drafted, nodes, parents))
    return accepted


def _origin(draft: RequestDraft, num_accepted: int, path: list[int] | None) -> int:
    """What the token after the accepted ones is: a bonus token when nothing was drafted behind them."""
    if not len(draft):
        return PLAIN
    if path is None or draft.parents is None:
        return BONUS if num_accepted == len(draft) else RECOVERED
    node = path[num_accepted - 1] if num_accepted else -1
    return RECOVERED if node in draft.parents else BONUS


def _compact_accepted_paths(step: StepBatch, accepted_nodes: torch.Tensor, cache: KVCache) -> None:
    """Move the K/V of accepted tree paths to where a chain would have written it.

    Node j of a request sits in the slot of its packed index; the i-th accepted node belongs i slots after the anchor.
    All sources are read before the first goal is written.
    """
    nodes = accepted_nodes.to(torch.int64)
    request, depth = (nodes >= 0).nonzero(as_tuple=True)
    first_row = step.layout.row_start[:-1].to(torch.int64)[request]
    anchor = step.packed.logits_indices[first_row]
    source = step.packed.slot_mapping[anchor + 1 + nodes[request, depth]]
    goal = step.packed.slot_mapping[anchor + 1 + depth]
    for layer in cache.layers:
        layer.keys[goal] = layer.keys[source]
        layer.values[goal] = layer.values[source]
