"""Options that forbid or favour single tokens: allowed ids, logit bias, bad words, min tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from specdec.sampling.rows import StepRows
from specdec.types import PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from specdec.sampling.batch import SampledRequest, SamplingBatch

_ANY_TOKEN = -2
T = TypeVar("T")


class _PerRequest(Generic[T]):
    """Tensors made once from a request's parameters and kept until it ends."""

    def __init__(self, make: Callable[[SampledRequest], T]) -> None:
        self._make = make
        self._kept: dict[str, T] = {}

    def get(self, request: SampledRequest) -> T:
        kept = self._kept.get(request.request_id)
        if kept is None:
            kept = self._kept[request.request_id] = self._make(request)
        return kept

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)


@frozen(eq=False)
class _Bias:
    allowed: Tensor | None
    """int64 [A]: the only tokens that stay."""
    token_ids: Tensor
    """int64 [M]."""
    amounts: Tensor
    """float32 [M]: added to the logits of ``token_ids``."""


class TokenBias:
    """`allowed_token_ids` and `logit_bias`: the same for every row of a request."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._biases = _PerRequest(self._make)

    def _make(self, request: SampledRequest) -> _Bias:
        params = request.params
        allowed = params.allowed_token_ids
        bias = params.logit_bias
        return _Bias(
            allowed=None if allowed is None else torch.tensor(allowed, dtype=torch.int64, device=self._device),
            token_ids=torch.tensor(list(bias), dtype=torch.int64, device=self._device),
            amounts=torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
        )

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for."""
        return batch.biased

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        for r in step.batch.biased:
            bias = self._biases.get(step.batch.requests[r])
            own = logits[step.rows_of(r)]
            if bias.allowed is not None:
                kept = own[:, bias.allowed]
                own.fill_(-torch.inf)
                own[:, bias.allowed] = kept
            if bias.token_ids.shape[0]:
                own[:, bias.token_ids] += bias.amounts

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._biases.forget(request_id)


@frozen(eq=False)
class _Banned:
    last: Tensor
    """int64 [M]: the tokens that would complete each sequence."""
    before: Tensor
    """int64 [M, L]: the tokens before it, nearest first, padded with -2, which fits anything."""


class BadWords:
    """`bad_words`: forbid the token that would complete a banned sequence of output tokens.

    A sequence may begin in the committed output and go on in the draft.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._banned = _PerRequest(self._make)

    def _make(self, request: SampledRequest) -> _Banned:
        sequences = [s for s in request.params.bad_words_token_ids if s[-1] < self._vocab_size]
        length = max((len(s) - 1 for s in sequences), default=0)
        before = np.full((len(sequences), length), _ANY_TOKEN, dtype=np.int64)
        for row, sequence in zip(before, sequences, strict=True):
            row[: len(sequence) - 1] = sequence[-2::-1]
        return _Banned(
            last=torch.tensor([s[-1] for s in sequences], dtype=torch.int64, device=self._device),
            before=torch.from_numpy(before).to(self._device),
        )

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for."""
        return batch.with_bad_words

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        for r in step.batch.with_bad_words:
            request = step.batch.requests[r]
            banned = self._banned.get(request)
            said = self._said_before(request, step.drafted_before[step.rows_of(r)], banned.before.shape[1])
            fits = (said[:, None] == banned.before) | (banned.before == _ANY_TOKEN)
            penalty = torch.zeros(fits.shape[:2], device=self._device).masked_fill(fits.all(dim=-1), -torch.inf)
            # Several sequences may end in one token, so add rather than set.
            logits[step.rows_of(r)].index_add_(1, banned.last, penalty)

    def _said_before(self, request: SampledRequest, drafted: Tensor, length: int) -> Tensor:
        """int64 [rows, length]: output tokens before each row, committed and drafted, nearest first, padded with -1."""
        output = request.token_ids[request.num_prompt_tokens :]
        recent = np.full(length, PLACEHOLDER_TOKEN_ID, dtype=np.int64)
        tail = output[::-1][:length]
        recent[: len(tail)] = tail
        depth = (drafted >= 0).sum(dim=1, keepdim=True)
        place = torch.arange(length, device=self._device)
        committed = torch.from_numpy(recent).to(self._device)[(place - depth).clamp(min=0)]
        padded = torch.nn.functional.pad(drafted, (0, length), value=PLACEHOLDER_TOKEN_ID)[:, :length]
        return torch.where(place < depth, padded, committed)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._banned.forget(request_id)


class MinTokens:
    """`min_tokens`: forbid end and stop tokens in rows that come too early, counting drafted tokens before the row.

    Where a grammar allows nothing but end tokens, the output ends early all the same.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._stops = _PerRequest(self._make)

    def _make(self, request: SampledRequest) -> Tensor:
        stops = sorted(t for t in request.stop_token_ids if 0 <= t < self._vocab_size)
        return torch.tensor(stops, dtype=torch.int64, device=self._device)

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests that are still too short."""
        return tuple(
            r
            for r in batch.with_min_tokens
            if len(batch.requests[r].token_ids) < _first_free_position(batch.requests[r])
        )

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        for r in self.indices(step.batch):
            request = step.batch.requests[r]
            stops = self._stops.get(request)
            rows = step.rows_of(r)
            early = step.layout.positions[rows, None] < _first_free_position(request)
            if request.params.structured_outputs is not None:
                # Where a grammar is at its end, an end token is all that is left.
                early &= torch.from_numpy(~step.only_ends[rows, None]).to(self._device)
            own = logits[rows]
            own[:, stops] = own[:, stops].masked_fill(early, -torch.inf)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._stops.forget(request_id)


def _first_free_position(request: SampledRequest) -> int:
    """The first sequence position at which a stop token is allowed."""
    return request.num_prompt_tokens + request.params.min_tokens
