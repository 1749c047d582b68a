"""Counts thinking tokens in front of each row, and forces the end of thinking when the budget is used up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from attrs import define

from specdec.errors import ConfigError, InvalidRequestError
from specdec.sampling.processor import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec.sampling.params import SamplingParams
    from specdec.sampling.processor import ProcessorRows

ARGUMENT = "thinking_budget"
"""The key of ``SamplingParams.extra_args``."""


def tokens_of(tokenizer: Any, name: str, text: str) -> tuple[int, ...]:
    """The tokens of a marker.

    Raises:
        ConfigError: there is no tokenizer, or it turns the text into nothing.
    """
    path = f"logits_processor_options.thinking_budget.{name}"
    if tokenizer is None:
        raise ConfigError(f"{path} is a text, and this model has no tokenizer; set tokenizer.", path=path)
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not tokens:
        raise ConfigError(f"{path} is {text!r}, which the tokenizer turns into no token.", path=path)
    return tokens


@define
class _Progress:
    """Where a text stands: all that the next token needs."""

    thinking: bool = False
    num_thinking: int = 0
    """Tokens since the start marker."""
    matched: int = 0
    """How many tokens of the marker that is looked for (start or end) the text ends with."""
    num_seen: int = 0
    """Tokens of the text taken in."""


class ThinkingBudget(LogitsProcessor):
    """``extra_args={"thinking_budget": N}``: after N tokens of thinking only the end marker can follow.

    Thinking begins behind the start marker, in the prompt or in the output, and ends with the end marker. Tokens of an
    end marker that the model writes by itself count as thinking until it is complete, but are not asked for again.
    """

    name: ClassVar[str] = "thinking_budget"

    def __init__(self, *, start: Sequence[int], end: Sequence[int], default: int | None = None) -> None:
        """Take the markers.

        Args:
            start: tokens of the start marker, at least one.
            end: tokens of the end marker, at least one.
            default: budget of requests without one of their own; None leaves them alone.
        """
        self._start = tuple(start)
        self._end = tuple(end)
        self._default = default
        self._committed: dict[str, _Progress] = {}

    def check(self, params: SamplingParams) -> None:
        """See `LogitsProcessor.check`."""
        budget = params.extra_args.get(ARGUMENT)
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidRequestError(f"extra_args.{ARGUMENT} is {budget!r}; it must be an integer of at least 0.")

    def applies(self, params: SamplingParams) -> bool:
        """See `LogitsProcessor.applies`."""
        return self._budget(params) is not None

    def process(self, logits: torch.Tensor, rows: ProcessorRows) -> None:
        """See `LogitsProcessor.process`."""
        forced_rows, forced_tokens = [], []
        starts = rows.row_start.tolist()
        for r, (request_id, params) in enumerate(zip(rows.request_ids, rows.params, strict=True)):
            budget = self._budget(params)
            progress = self._committed_progress(request_id, rows.token_ids[r])
            if budget is None:
                continue
            for row in range(starts[r], starts[r + 1]):
                drafted = rows.drafted[row, : rows.num_drafted[row]]
                here = self._follow(_Progress(progress.thinking, progress.num_thinking, progress.matched), drafted)
                if here.thinking and here.num_thinking >= budget:
                    forced_rows.append(row)
                    forced_tokens.append(self._end[here.matched])
        if forced_rows:
            _force(logits, forced_rows, forced_tokens)

    def forget(self, request_id: str) -> None:
        """See `LogitsProcessor.forget`."""
        self._committed.pop(request_id, None)

    def _budget(self, params: SamplingParams) -> int | None:
        budget: int | None = params.extra_args.get(ARGUMENT, self._default)
        return budget

    def _committed_progress(self, request_id: str, token_ids: np.ndarray) -> _Progress:
        """The progress of the committed text; each token is looked at once."""
        progress = self._committed.get(request_id)
        if progress is None or progress.num_seen > len(token_ids):
            progress = self._committed[request_id] = _Progress()
        return self._follow(progress, token_ids[progress.num_seen :])

    def _follow(self, progress: _Progress, token_ids: Iterable[int]) -> _Progress:
        for token in np.asarray(token_ids, dtype=np.int64).tolist():
            marker = self._end if progress.thinking else self._start
            progress.matched = _match(marker, progress.matched, token)
            progress.num_thinking += progress.thinking
            if progress.matched == len(marker):
                progress.thinking = not progress.thinking
                progress.matched = progress.num_thinking = 0
            progress.num_seen += 1
        return progress


def _match(marker: tuple[int, ...], matched: int, token: int) -> int:
    """How much of the marker a text ends with that ended with ``matched`` tokens of it and got one more token."""
    said = (*marker[:matched], token)
    return next((n for n in range(len(said), 0, -1) if said[len(said) - n :] == marker[:n]), 0)


def _force(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """Leave one token in each of some rows."""
    index = torch.tensor(rows, device=logits.device)
    chosen = torch.tensor(tokens, device=logits.device)
    logits[index] = -torch.inf
    logits[index, chosen] = 0.0
