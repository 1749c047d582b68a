"""From a plan to the tensors of one step.

Packed layout of a step with a prefill chunk (request 0), a request with two draft tokens (1) and a plain one (2)::

    input_ids        p0 p1 p2 p3 | a  x1 x2 | a
    query_start_loc  0             4          7   8
    logits rows      (none)        0  1  2    3        row_start of the sampling requests: 0 3 4

Requests that do not reach their last token in this step have no rows; ``sampling`` lists the others in order.
Rows for prompt logprobs come after the sampling rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from specdec.sampling.batch import RowLayout
from specdec.types import Draft, PackedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.engine.plan import Plan, ScheduledRequest
    from specdec.engine.request import Request, RequestDraft


@frozen(eq=False)
class PromptRows:
    """Rows whose logits give a request's prompt logprobs."""

    request: Request
    first_row: int
    """Index into the step's logits."""
    token_ids: np.ndarray
    """int64 [n]: the prompt tokens that the n rows predict."""


@frozen(eq=False)
class StepBatch:
    """Everything the stages of one step read."""

    packed: PackedBatch
    scheduled: tuple[ScheduledRequest, ...]
    sampling: tuple[ScheduledRequest, ...]
    """The scheduled requests that emit tokens, in order."""
    sampling_rows: np.ndarray
    """int32 [len(sampling)]: the index of each in ``packed``."""
    layout: RowLayout
    draft: Draft
    prompt_rows: tuple[PromptRows, ...]


class BatchBuilder:
    """Builds step batches; keeps the block tables of running requests between steps."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_lookahead_slots: int = 0,
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._num_lookahead_slots = num_lookahead_slots
        max_blocks = -(-(max_model_len + num_lookahead_slots + 1) // block_size)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._row_owner: list[tuple[Request, int] | None] = [None] * max_num_seqs
        self._row_length = [0] * max_num_seqs

    def build(self, plan: Plan) -> StepBatch:
        """Flatten the plan's tokens and look up their slots."""
        scheduled = plan.scheduled
        num_requests = len(scheduled)
        starts = np.empty(num_requests, dtype=np.int64)
        lengths = np.empty(num_requests, dtype=np.int64)
        rows = np.empty(num_requests, dtype=np.int64)
        for i, share in enumerate(scheduled):
            starts[i] = share.num_computed_tokens
            lengths[i] = share.num_tokens
            rows[i] = self._update_block_table(share.request)

        query_start_loc = np.zeros(num_requests + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        request_of_token = np.repeat(np.arange(num_requests), lengths)
        slot_positions = np.arange(num_tokens) - np.repeat(query_start_loc[:-1] - starts, lengths)
        blocks = self._block_tables[rows[request_of_token], slot_positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + slot_positions % self._block_size

        input_ids = np.empty(num_tokens, dtype=np.int64)
        offsets = query_start_loc.tolist()
        for i, share in enumerate(scheduled):
            _fill_token_ids(input_ids, offsets[i], share)
        positions, parents = _tree_positions(scheduled, offsets, slot_positions)
        seq_lens = starts + lengths
        max_seq_len = int(seq_lens.max())
        block_tables = self._block_tables[rows, : -(-(max_seq_len + self._num_lookahead_slots) // self._block_size)]

        sampling_rows = np.array([i for i, share in enumerate(scheduled) if share.samples], dtype=np.int32)
        sampling = scheduled if len(sampling_rows) == num_requests else tuple(scheduled[i] for i in sampling_rows)
        layout, row_tokens = self._layout(sampling, query_start_loc[sampling_rows + 1], positions)
        prompt_rows, prompt_tokens = _prompt_rows(scheduled, offsets, len(row_tokens))
        if prompt_rows:
            row_tokens = np.concatenate([row_tokens, prompt_tokens])
        packed = PackedBatch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            query_start_loc=self._tensor(query_start_loc.astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(block_tables),
            logits_indices=self._tensor(row_tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
            parents=None if parents is None else self._tensor(parents),
        )
        return StepBatch(packed, scheduled, sampling, sampling_rows, layout, self._draft(sampling), tuple(prompt_rows))

    def _update_block_table(self, request: Request) -> int:
        """Copy the request's new block ids into its row; return the row. A preempted request starts a new row."""
        row = request.batch_row
        count = len(request.block_ids)
        owner = self._row_owner[row]
        if owner is None or owner[0] is not request or owner[1] != request.num_preemptions:
            self._row_owner[row] = (request, request.num_preemptions)
            self._row_length[row] = 0
        known = self._row_length[row]
        if known < count:
            self._block_tables[row, known:count] = request.block_ids[known:]
            self._row_length[row] = count
        return row

    def _layout(
        self, sampling: Sequence[ScheduledRequest], ends: np.ndarray, positions: np.ndarray
    ) -> tuple[RowLayout, np.ndarray]:
        """The logits rows of the sampling requests: the last token and the draft tokens of each."""
        num_rows = np.array([1 + len(share.draft) for share in sampling], dtype=np.int64)
        row_start = np.zeros(len(sampling) + 1, dtype=np.int64)
        np.cumsum(num_rows, out=row_start[1:])
        request_index = np.repeat(np.arange(len(sampling)), num_rows)
        row_tokens = np.arange(int(row_start[-1])) + np.repeat(ends - row_start[1:], num_rows)
        layout = RowLayout(
            row_start=self._tensor(row_start.astype(np.int32)),
            request_index=self._tensor(request_index),
            positions=self._tensor(positions[row_tokens] + 1),
            num_requests=len(sampling),
            rows_per_request=num_rows,
            max_depth=int(num_rows.max(initial=1)) - 1,
        )
        return layout, row_tokens

    def _draft(self, sampling: Sequence[ScheduledRequest]) -> Draft:
        drafts = [share.draft for share in sampling]
        counts = np.array([len(draft) for draft in drafts], dtype=np.int32)
        tokens = np.array([token for draft in drafts for token in draft.token_ids], dtype=np.int64)
        parents = None
        if any(draft.parents is not None for draft in drafts):
            nodes = [p for d in drafts for p in (d.parents or range(-1, len(d) - 1))]
            parents = self._tensor(np.array(nodes, dtype=np.int32))
        probs = _draft_probs(drafts)
        return Draft(
            token_ids=self._tensor(tokens), num_draft_tokens=self._tensor(counts), parents=parents, draft_probs=probs
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _draft_probs(drafts: Sequence[RequestDraft]) -> torch.Tensor | None:
    """float32 [N, V]: the drafts' laws, one-hot for drafts that came without; None when all did."""
    known = [draft.probs for draft in drafts if draft.probs is not None]
    if not known:
        return None
    rows = []
    for draft in drafts:
        probs = draft.probs
        if probs is None:
            probs = known[0].new_zeros(len(draft), known[0].shape[1], dtype=torch.float32)
            probs[range(len(draft)), draft.token_ids] = 1.0
        rows.append(probs.float())
    return torch.cat(rows)


def _fill_token_ids(input_ids: np.ndarray, offset: int, share: ScheduledRequest) -> None:
    request, start = share.request, share.num_computed_tokens
    known = min(share.num_tokens, request.num_tokens - start)
    input_ids[offset : offset + known] = request.token_ids[start : start + known]
    if share.draft.token_ids:
        input_ids[offset + known : offset + share.num_tokens] = share.draft.token_ids


def _tree_positions(
    scheduled: Sequence[ScheduledRequest], offsets: Sequence[int], slot_positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions by depth and parents by packed index, for steps with a tree; slots and positions agree otherwise."""
    if all(share.draft.parents is None for share in scheduled):
        return slot_positions, None
    positions = slot_positions.copy()
    parents = np.empty(len(positions), dtype=np.int32)
    for offset, share in zip(offsets, scheduled, strict=False):
        own = np.arange(-1, share.num_tokens - 1, dtype=np.int32)
        if share.draft.parents is not None:
            anchor = share.num_tokens - len(share.draft) - 1
            own[anchor + 1 :] = np.asarray(share.draft.parents, dtype=np.int32) + (anchor + 1)
            for node in range(anchor + 1, share.num_tokens):
                positions[offset + node] = positions[offset + own[node]] + 1
        parents[offset : offset + share.num_tokens] = own
    return positions, parents


def _prompt_rows(
    scheduled: Sequence[ScheduledRequest], offsets: Sequence[int], first_row: int
) -> tuple[list[PromptRows], np.ndarray]:
    """Rows for the prompt tokens that this step's chunks predict, for requests that ask for prompt logprobs."""
    found: list[PromptRows] = []
    tokens: list[np.ndarray] = []
    for i, share in enumerate(scheduled):
        request = share.request
        if request.prompt_logprobs is None or len(request.prompt_logprobs) >= request.num_prompt_tokens:
            continue
        begin = max(share.num_computed_tokens, len(request.prompt_logprobs) - 1)
        end = min(share.num_computed_tokens + share.num_tokens, request.num_prompt_tokens - 1)
        if begin >= end:
            continue
        found.append(PromptRows(request, first_row, request.token_ids[begin + 1 : end + 1]))
        tokens.append(np.arange(begin, end) + (offsets[i] - share.num_computed_tokens))
        first_row += end - begin
    return found, np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int64)
