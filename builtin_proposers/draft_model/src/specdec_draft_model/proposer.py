"""Drafting with a small causal language model (Leviathan et al. 2023, Chen et al. 2023).

The drafter's K/V lies in the target's blocks, so it knows a text up to some position; what is missing is run before a
draft begins: usually one token, two after a draft that was accepted as a whole. A step's work is one forward pass over
all that is missing, of all requests, and one more for each further draft token; with parallel drafting (PARD, An et
al. 2025) mask tokens stand in the first pass for all the others, and it is the only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import field, frozen

from specdec.drafting import Proposer
from specdec.drafting.kit import (
    ChainDrafter,
    DraftSampler,
    DraftState,
    DraftValidity,
    SlotTable,
    Span,
    logits_in_parallel,
    no_draft,
)
from specdec.types import Needs, ProposerCapabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specdec.target.model import TargetModel
    from specdec.types import ComputedStep, Draft, EngineContext, ProposalInput, RequestInfo
    from specdec_draft_model.config import DraftModelConfig
    from specdec_draft_model.drafter import Drafter

MAX_LAG = 64
"""How far the drafter may stay behind a request that decodes without drafts, so that it catches up in few passes."""


class DraftModelProposer(Proposer):
    """See the module's docstring."""

    def __init__(self, config: DraftModelConfig, engine: EngineContext, drafter: Drafter) -> None:
        """Draft with a loaded drafter.

        Args:
            config: the method's options.
            engine: facts about the engine.
            drafter: not bound to the target's blocks yet.
        """
        sampler = DraftSampler(config.draft_sample_method)
        self.needs = Needs(every_step=True, lookahead_slots=engine.num_speculative_tokens)
        self.capabilities = ProposerCapabilities(draft_probs=sampler.needs_probs)
        self.drafter = drafter
        vocabulary = drafter.vocabulary
        self._chain = ChainDrafter(
            sampler,
            vocab_size=engine.target_info.vocab_size,
            confidence_threshold=config.confidence_threshold,
            to_target_ids=None if vocabulary.target_ids is None else vocabulary.to_target_ids,
        )
        self._engine = engine
        self._max_tokens = int(engine.settings.get("max_num_batched_tokens", 2048))
        self._share_prefixes = bool(engine.settings.get("enable_prefix_caching", True))
        self._never: set[str] = set()
        """Requests that want no drafts at all."""
        self._validity: DraftValidity
        self._block_size = engine.block_size

    def kv_bytes_per_token(self) -> int:
        """See `Proposer.kv_bytes_per_token`."""
        return self.drafter.model.kv_bytes_per_token()

    def load(self, target: TargetModel) -> None:
        """See `Proposer.load`."""
        geometry = target.kv_geometry
        self._block_size = geometry.block_size
        self._validity = DraftValidity(geometry, share_prefixes=self._share_prefixes)
        self.drafter.bind(self._engine, geometry)

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`."""
        if request.speculation is not None and request.speculation.limit(1) == 0:
            self._never.add(request.request_id)

    @torch.inference_mode()
    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        if batch.computed is None:
            raise ValueError("ProposalInput.computed is missing; the proposer declares needs.every_step")
        tables = SlotTable(batch.computed, self._block_size, self.drafter.model.device)
        step = _Step(batch, batch.computed, tables, self._validity.update(batch.computed, tables))
        limits = self._limits(step)
        spans = self._spans(step, limits)
        logits = self._run(step, spans, limits)
        if logits is None:
            return no_draft(len(limits))
        if self.drafter.mask_token_id is not None:
            return self._chain.run(batch, limits, *logits_in_parallel(logits, limits)).draft()
        return self._one_by_one(step, limits, logits)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._validity.forget(request_id)
        self._never.discard(request_id)

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`."""
        return self.drafter.memory()

    def _limits(self, step: _Step) -> np.ndarray:
        """int64 [B]: how many tokens can be drafted for each request; the drafter's positions may end earlier."""
        lengths = np.array([len(text) for text in step.batch.token_ids], dtype=np.int64)
        return np.clip(np.minimum(step.batch.max_draft_tokens, self.drafter.max_model_len - lengths + 1), 0, None)

    def _spans(self, step: _Step, limits: np.ndarray) -> list[Span]:
        """What the drafter has to be run over: first of the requests that get a draft, in order, then of others.

        At most ``max_num_batched_tokens`` are run; a request whose missing part does not fit gets no draft in this
        step (its entry of ``limits`` becomes 0), but a part of it is run.
        """
        room = max(self._max_tokens, 2 * len(limits))
        lag = [len(text) - step.state_of(i).num_valid for i, text in enumerate(step.batch.token_ids)]
        whole: dict[int, Span] = {}
        others: list[Span] = []
        for i in sorted(np.flatnonzero(limits).tolist(), key=lambda i: lag[i]):
            row, start, text = int(step.rows[i]), step.state_of(i).num_valid, step.batch.token_ids[i]
            if lag[i] <= room:
                whole[i] = self._draft_span(row, start, text, int(limits[i]))
            else:
                limits[i] = 0
                others += self._span(row, start, min(start + room, len(text)), text)
            room -= min(room, lag[i])
        drafting = {int(step.rows[i]) for i in np.flatnonzero(limits)} | {span.row for span in others}
        for row in range(len(step.states)):
            if row not in drafting and room > 0:
                start, end = step.states[row].num_valid, self._wanted_end(step, row)
                others += self._span(row, start, min(end, start + room), step.computed.token_ids[row])
                room -= max(0, min(end - start, room))
        return [*(whole[i] for i in sorted(whole)), *others]

    def _wanted_end(self, step: _Step, row: int) -> int:
        """Up to which position the drafter should have run over a request that gets no draft in this step."""
        computed = step.computed
        known = min(int(computed.num_computed[row]), self.drafter.max_model_len)
        start = step.states[row].num_valid
        if computed.request_ids[row] in self._never:
            return start
        if computed.finished[row]:
            return known // self._block_size * self._block_size if self._share_prefixes else start
        if computed.samples[row] and known - start < MAX_LAG:
            return start
        return known

    def _draft_span(self, row: int, start: int, text: np.ndarray, limit: int) -> Span:
        token_ids = self.drafter.vocabulary.to_draft[text[start:]]
        mask = self.drafter.mask_token_id
        if mask is None:
            return Span(row, start, token_ids, 1)
        return Span(row, start, np.append(token_ids, np.full(limit - 1, mask)), limit)

    def _span(self, row: int, start: int, end: int, text: np.ndarray) -> list[Span]:
        return [Span(row, start, self.drafter.vocabulary.to_draft[text[start:end]])] if end > start else []

    def _run(self, step: _Step, spans: list[Span], limits: np.ndarray) -> Tensor | None:
        """Run the spans; logits of the drafting requests' newest tokens and masks, or None when there are none."""
        if not spans:
            return None
        longest = int(limits.max(initial=0))
        for span in spans:
            ahead = longest if span.num_wanted else 0
            self._validity.writing(span.row, span.start, span.end + ahead, step.tables)
        logits = self.drafter.forward(step.tables.batch_of_spans(spans))
        for span in spans:
            text = step.computed.token_ids[span.row]
            self._validity.reached(step.states[span.row], min(span.end, len(text)), span.row, text, step.tables)
        return logits if logits.shape[0] else None

    def _one_by_one(self, step: _Step, limits: np.ndarray, logits: Tensor) -> Draft:
        lengths = np.array([len(text) for text in step.batch.token_ids], dtype=np.int64)
        ran: list[tuple[np.ndarray, Tensor]] = []

        def next_logits(token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
            ran.append((chosen, token_ids))
            fed = self.drafter.vocabulary.fed(token_ids)
            return self.drafter.forward(step.tables.batch_of_tokens(fed, step.rows[chosen], lengths[chosen] + depth))

        draft = self._chain.run(step.batch, limits, logits, next_logits).draft()
        for chosen, token_ids in ran:
            for i, token in zip(chosen.tolist(), token_ids.tolist(), strict=True):
                state = step.state_of(i)
                state.drafted_from = int(lengths[i])
                state.drafted.append(token)
        return draft


@frozen(eq=False)
class _Step:
    """What one proposal works on."""

    batch: ProposalInput
    computed: ComputedStep
    tables: SlotTable
    states: list[DraftState]
    """Of each request of ``computed``."""
    rows: np.ndarray = field(init=False)
    """int64 [B]: the row in ``computed`` of each request of ``batch``."""

    def __attrs_post_init__(self) -> None:
        row_of = {name: row for row, name in enumerate(self.computed.request_ids)}
        rows = np.array([row_of[name] for name in self.batch.request_ids], dtype=np.int64)
        object.__setattr__(self, "rows", rows)

    def state_of(self, index: int) -> DraftState:
        """The state of a request of ``batch``."""
        return self.states[self.rows[index]]
