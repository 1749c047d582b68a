"""Repetition, presence and frequency penalties, counting committed tokens and the draft tokens before each row.

What has been said is kept per request as one row of int32 [V], so that a step costs the same whatever the length of the
output: bit 0 says that the token is in the prompt, the bits above count it in the output. It is a function of the
request's token ids alone; each step adds what was committed since the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import define
from torch import Tensor

from specdec.sampling.rows import StepRows

if TYPE_CHECKING:
    from specdec.sampling.batch import SampledRequest, SamplingBatch

IN_PROMPT = 1
"""Added to a token's state once when the prompt has it."""
IN_OUTPUT = 2
"""Added for each time the output has it."""


def penalized(logits: Tensor, state: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits after the penalties; the arguments broadcast.

    Tokens of prompt or output have positive logits divided and others multiplied by ``repetition`` (Keskar et al. 2019,
    CTRL); then tokens of the output lose ``frequency`` times their count, and ``presence``.
    """
    count = state >> 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(state > 0, repeated, logits)
    return logits - frequency * count - presence * (count > 0)


@define
class _Counted:
    """How far a request's tokens are in the table."""

    slot: int
    num_tokens: int = 0
    last_token: int = -1


class TokenCounts:
    """One row of token states per request that has a penalty."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._counted: dict[str, _Counted] = {}
        self._free: list[int] = []

    @property
    def table(self) -> Tensor:
        """int32 [slots, V]."""
        return self._table

    def update(self, requests: list[SampledRequest]) -> np.ndarray:
        """Count what the requests have committed since the last call; return their slots, int64 [len(requests)].

        A request whose tokens are no continuation of those counted (fewer, or another last one) is counted anew.
        """
        slots = np.empty(len(requests), dtype=np.int64)
        cells: list[np.ndarray] = []
        for i, request in enumerate(requests):
            counted = self._counted.get(request.request_id) or self._start(request.request_id)
            slots[i] = counted.slot
            tokens = request.token_ids
            seen = counted.num_tokens
            if len(tokens) == seen and (seen == 0 or tokens[-1] == counted.last_token):
                continue
            if not 0 < seen <= len(tokens) or tokens[seen - 1] != counted.last_token:
                self._fill_prompt(counted.slot, tokens[: request.num_prompt_tokens])
                seen = min(request.num_prompt_tokens, len(tokens))
            cells.append(counted.slot * self._table.shape[1] + tokens[seen:])
            counted.num_tokens, counted.last_token = len(tokens), int(tokens[-1])
        self._count_output(cells)
        return slots

    def _start(self, request_id: str) -> _Counted:
        if not self._free:
            old, vocab_size = self._table.shape
            more = max(4, old)
            grown = torch.zeros(old + more, vocab_size, dtype=torch.int32, device=self._table.device)
            grown[:old] = self._table
            self._table = grown
            self._free = list(range(old + more - 1, old - 1, -1))
        counted = self._counted[request_id] = _Counted(self._free.pop())
        return counted

    def _fill_prompt(self, slot: int, prompt: np.ndarray) -> None:
        row = np.zeros(self._table.shape[1], dtype=np.int32)
        row[prompt] = IN_PROMPT
        self._table[slot] = torch.from_numpy(row).to(self._table.device)

    def _count_output(self, cells: list[np.ndarray]) -> None:
        flat = np.concatenate(cells) if cells else np.empty(0, dtype=np.int64)
        if len(flat):
            index = torch.from_numpy(flat).to(self._table.device)
            self._table.view(-1).index_add_(0, index, torch.full_like(index, IN_OUTPUT, dtype=torch.int32))

    def forget(self, request_id: str) -> None:
        """The request ended: its slot is free."""
        counted = self._counted.pop(request_id, None)
        if counted is not None:
            self._free.append(counted.slot)


class Penalties:
    """The stage of the pipeline."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._counts = TokenCounts(device, vocab_size)

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for."""
        return batch.penalized

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        batch = step.batch
        slots = self._counts.update([batch.requests[r] for r in batch.penalized])
        rows = step.rows_of_all(batch.penalized)
        slot_of_row = np.repeat(slots, step.layout.rows_per_request[list(batch.penalized)])
        if self._device.type == "cpu":
            self._apply_on_cpu(logits, step, rows, slot_of_row)
        else:
            apply_penalties(logits, step, rows, slot_of_row, self._counts.table)

    def _apply_on_cpu(self, logits: Tensor, step: StepRows, rows: np.ndarray, slot_of_row: np.ndarray) -> None:
        from specdec.sampling.cpu import KERNELS

        batch = step.batch
        KERNELS.function("penalize_rows")(
            logits.numpy(),
            rows,
            step.layout.request_index.numpy(),
            slot_of_row,
            self._counts.table.numpy(),
            step.drafted_before.numpy(),
            batch.repetition_penalty.numpy(),
            batch.presence_penalty.numpy(),
            batch.frequency_penalty.numpy(),
        )

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._counts.forget(request_id)


def apply_penalties(logits: Tensor, step: StepRows, rows: np.ndarray, slot_of_row: np.ndarray, table: Tensor) -> None:
    """The penalties in plain torch, for any device.

    Args:
        logits: float32 [R, V], changed in place.
        step: the step's rows.
        rows: int64 [P], the rows to change.
        slot_of_row: int64 [P], their rows of ``table``.
        table: int32 [slots, V], token states.
    """
    batch = step.batch
    index = torch.from_numpy(rows).to(logits.device)
    request = step.layout.request_index[index]
    strengths = [
        strength[request, None]
        for strength in (batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty)
    ]
    raw = logits[index]
    state = table[torch.from_numpy(slot_of_row).to(logits.device)]
    changed = penalized(raw, state, *strengths)
    drafted = step.drafted_before[index]
    if drafted.shape[1]:
        # A padded entry stands for token 0 with whatever the draft has of it, so it writes what is true anyway.
        tokens = drafted.clamp(min=0)
        times = (tokens[:, :, None] == drafted[:, None, :]).sum(dim=-1, dtype=torch.int32)
        said = state.gather(1, tokens) + IN_OUTPUT * times
        changed.scatter_(1, tokens, penalized(raw.gather(1, tokens), said, *strengths))
    logits[index] = changed
