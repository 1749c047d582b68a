"""Log-probabilities of emitted and prompt tokens, with the most likely alternatives and the rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from specdec.sampling.ranking import first_ranked
from specdec.sampling.token_text import token_bytes

if TYPE_CHECKING:
    from specdec.sampling.params import SamplingParams

_CHUNK_BYTES = 64 << 20


@frozen
class Logprob:
    """One token's entry."""

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """1 for the most likely token: tokens with a greater log-probability, plus one."""
    decoded_token: str | None = None
    """The token's text by itself; None without a tokenizer."""


@frozen(eq=False, kw_only=True)
class LogprobRows:
    """Log-probabilities of E rows, on the device of the logits."""

    token_ids: Tensor
    """int64 [E]: the chosen tokens."""
    logprobs: Tensor
    """float32 [E]."""
    ranks: Tensor
    """int64 [E]."""
    top_token_ids: Tensor
    """int64 [E, n]: the most likely tokens, the lower id first among equals."""
    top_logprobs: Tensor
    """float32 [E, n]."""


def row_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, top_n: int, temperature: Tensor | None = None
) -> LogprobRows:
    """Log-probabilities of one token per row, computed in float32 a few rows at a time.

    Args:
        logits: [R, V], any float dtype.
        rows: int64 [E], which rows.
        token_ids: int64 [E], one token of each.
        top_n: how many of the most likely tokens; 0 for none, -1 for the whole vocabulary.
        temperature: float32 [E], divides the logits; None for 1.
    """
    vocab_size = logits.shape[1]
    count = vocab_size if top_n < 0 else min(top_n, vocab_size)
    step = max(1, _CHUNK_BYTES // (4 * vocab_size))
    parts = []
    for start in range(0, max(rows.shape[0], 1), step):
        part = slice(start, start + step)
        scale = None if temperature is None else temperature[part, None]
        parts.append(_row_logprobs(logits[rows[part]], token_ids[part, None], count, scale))
    logprobs, ranks, top_logprobs, top_token_ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return LogprobRows(
        token_ids=token_ids,
        logprobs=logprobs,
        ranks=ranks,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
    )


def _row_logprobs(
    logits: Tensor, token_ids: Tensor, count: int, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids)
    ranks = (logits > chosen).sum(dim=-1) + 1
    values, tokens = first_ranked(logits, count)
    return (chosen - normaliser)[:, 0], ranks, values - normaliser, tokens


def as_dicts(
    rows: LogprobRows, top_n: Sequence[int], decode: Callable[[int], str] | None = None
) -> list[dict[int, Logprob]]:
    """One dictionary per row: the chosen token first, then the most likely ones in order.

    Args:
        rows: as `row_logprobs` returns them, with at least as many alternatives as any row asks for.
        top_n: how many alternatives each row asked for; -1 for all there are.
        decode: the text of one token; None leaves it out.
    """

    def entry(token: int, value: float, place: int) -> Logprob:
        return Logprob(value, place, None if decode is None else decode(token))

    chosen = zip(rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), strict=True)
    top = zip(rows.top_token_ids.tolist(), rows.top_logprobs.tolist(), strict=True)
    dicts = []
    for (token_id, logprob, rank), (top_ids, top_logprobs), count in zip(chosen, top, top_n, strict=True):
        entries = {token_id: entry(token_id, logprob, rank)}
        size = len(top_ids) if count < 0 else count
        for place, (token, value) in enumerate(zip(top_ids[:size], top_logprobs, strict=False), start=1):
            if token not in entries:
                entries[token] = entry(token, value, place)
        dicts.append(entries)
    return dicts


class LogprobsRequest(Protocol):
    """What log-probabilities need of a request, and where they go."""

    params: SamplingParams
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float
    prompt_logprobs: list[dict[int, Logprob] | None] | None


class LogprobsComputer:
    """Adds log-probabilities to requests, from raw or processed logits as the engine is configured.

    Processed logits are divided by the temperature (not at 0); prompt tokens always have raw ones.
    """

    def __init__(self, mode: Literal["raw", "processed"], tokenizer: Any = None) -> None:
        self._mode = mode
        self._texts = None if tokenizer is None else _TokenTexts(tokenizer)

    def add_output(
        self,
        counts: Sequence[tuple[LogprobsRequest, int]],
        raw: Tensor,
        processed: Tensor,
        rows: np.ndarray,
        token_ids: np.ndarray,
    ) -> None:
        """Extend the requests' output log-probabilities.

        Args:
            counts: requests and how many tokens each emitted.
            raw: [R, V], what the model returned.
            processed: [R, V], what the verifier saw.
            rows: int64 [E], the row that gave each token, request by request.
            token_ids: int64 [E].
        """
        top_n = [n for request, count in counts for n in [_wanted(request.params.logprobs)] * count]
        temperature = None
        if self._mode == "processed":
            scales = [1.0 if r.params.greedy else r.params.temperature for r, count in counts for _ in range(count)]
            temperature = torch.tensor(scales, device=processed.device)
        dicts = self._dicts(raw if temperature is None else processed, rows, token_ids, top_n, temperature)
        tokens = iter(zip(dicts, token_ids.tolist(), strict=True))
        for request, count in counts:
            assert request.logprobs is not None
            for entries, token_id in islice(tokens, count):
                request.logprobs.append(entries)
                request.cumulative_logprob += entries[token_id].logprob

    def add_prompt(self, request: LogprobsRequest, raw: Tensor, first_row: int, token_ids: np.ndarray) -> None:
        """Extend a request's prompt log-probabilities.

        Args:
            request: its ``prompt_logprobs`` has an entry for every prompt token before these.
            raw: [R, V], what the model returned.
            first_row: the row that predicts the first of the tokens; the others follow it.
            token_ids: int64 [n], prompt tokens.
        """
        assert request.prompt_logprobs is not None
        rows = np.arange(first_row, first_row + len(token_ids))
        top_n = [_wanted(request.params.prompt_logprobs)] * len(token_ids)
        request.prompt_logprobs += self._dicts(raw, rows, token_ids, top_n, None)

    def _dicts(
        self, logits: Tensor, rows: np.ndarray, token_ids: np.ndarray, top_n: Sequence[int], temperature: Tensor | None
    ) -> list[dict[int, Logprob]]:
        found = row_logprobs(
            logits,
            torch.from_numpy(rows).to(logits.device),
            torch.from_numpy(np.array(token_ids)).to(logits.device),
            -1 if -1 in top_n else max(top_n, default=0),
            temperature,
        )
        return as_dicts(found, top_n, self._texts)


def _wanted(setting: int | None) -> int:
    assert setting is not None
    return setting


class _TokenTexts:
    """The text of single tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table = token_bytes(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = (
                self._tokenizer.decode([token_id])
                if self._table is None
                else self._table.of(token_id).decode(errors="replace")
            )
        return text
