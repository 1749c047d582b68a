"""Where an output ends: end and stop tokens, stop strings, the token limit; token by token inside a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from specdec.sampling.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import numpy as np

    from specdec.sampling.params import SamplingParams


@frozen
class StopDecision:
    """How much of a run of tokens stays."""

    num_tokens: int
    """The first tokens of the run that count; a stop token, or the token that completes a stop string, is the last."""
    text: str
    """The text that can be given out now."""
    finish_reason: Literal["stop", "length"] | None = None
    """None: the output goes on."""
    stop_reason: int | str | None = None
    """The stop token id or stop string; None for the model's end tokens and for the limit."""


class StopChecker:
    """Follows one output. A run of several tokens is treated as if each had come by itself.

    A stop counts only after ``min_tokens`` tokens. At one token, a stop comes before the limit. The text ends before
    the stop string or stop token, or with it when ``include_stop_str_in_output`` is set, and text that may yet become
    part of a stop string is held back. When several stop strings end at the same character, the one that begins first
    is taken.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | np.ndarray,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        """Begin an output.

        Args:
            params: the request's parameters.
            prompt_token_ids: the prompt, whose end is the context of the first text.
            tokenizer: None when there is none; then there is no text.
            eos_token_ids: the model's end tokens; left out of account with ``ignore_eos``.
            max_tokens: the most output tokens, with the model's length considered.
        """
        self._end_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_ids = frozenset(params.stop_token_ids) | self._end_ids
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._keep_stop_text = params.include_stop_str_in_output
        self._num_tokens = 0
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
            if params.detokenize and tokenizer is not None
            else None
        )
        self._stops = _StopStrings(params.stop, params.include_stop_str_in_output)

    def check(self, run: Sequence[int], *, ended: bool = False) -> StopDecision:
        """Take in the tokens of a step; nothing may follow once a decision has a finish reason.

        Args:
            run: the tokens.
            ended: the output ends with the run's last token, whatever it is and however few there are: its grammar is
                complete. A stop within the run comes first, the limit does not.
        """
        before = self._num_tokens
        kept, reason, stop = self._cut(run, ended)
        visible = kept[:-1] if stop is not None and not self._keep_stop_text else kept
        text = ""
        if self._detokenizer is not None and self._stops.any:
            pieces = [self._detokenizer.append([token]) for token in visible]
            text, match = self._stops.take(pieces, self._min_tokens - before)
            if match is not None:
                return StopDecision(match[0], text, "stop", match[1])
        elif self._detokenizer is not None:
            text = self._detokenizer.append(visible)
        if reason is not None:
            text += self.finish()
        return StopDecision(len(kept), text, reason, None if stop in self._end_ids else stop)

    def finish(self) -> str:
        """The text held back so far, for an output that ends for another reason."""
        rest = "" if self._detokenizer is None else self._detokenizer.finish()
        return self._stops.release(rest)

    def _cut(
        self, run: Sequence[int], ended: bool
    ) -> tuple[Sequence[int], Literal["stop", "length"] | None, int | None]:
        """The tokens up to a stop token or the limit, why they end, and the stop token."""
        before = self._num_tokens
        for count, token in enumerate(run, start=1):
            self._num_tokens = before + count
            if token in self._stop_ids and self._num_tokens > self._min_tokens:
                return run[:count], "stop", token
            if ended and count == len(run):
                return run, "stop", None
            if self._num_tokens >= self._max_tokens:
                return run[:count], "length", None
        return run, None, None


class _StopStrings:
    """Looks for stop strings in text that comes in pieces."""

    def __init__(self, stops: Sequence[str], keep_match: bool) -> None:
        self._stops = stops
        self._keep_match = keep_match
        self._longest = max(map(len, stops), default=0)
        self._firsts = {stop[0] for stop in stops}
        self._tail = ""
        """The longest end of the text so far with which a stop string begins; held back unless matches are kept."""

    @property
    def any(self) -> bool:
        return bool(self._stops)

    def take(self, pieces: Sequence[str], first_that_counts: int) -> tuple[str, tuple[int, str] | None]:
        """Add the texts of several tokens.

        Args:
            pieces: one text per token.
            first_that_counts: the first piece that may complete a stop string; those completed earlier are passed over.

        Returns:
            The text to give out; and when a stop string is complete, the number of pieces up to its end, and it.
        """
        text = self._tail + "".join(pieces)
        if not any(stop in text for stop in self._stops):
            return self._give(text), None
        given = ""
        for count, piece in enumerate(pieces, start=1):
            text = self._tail + piece
            match = self._first_match(text, len(self._tail)) if count > first_that_counts else None
            if match is not None:
                start, stop = match
                end = start + len(stop) if self._keep_match else start
                return given + text[len(self._tail) if self._keep_match else 0 : end], (count, stop)
            given += self._give(text)
        return given, None

    def _give(self, text: str) -> str:
        """Keep the end of ``text`` (the tail and what came after it) that may begin a stop string; return the news."""
        known = len(self._tail) if self._keep_match else 0
        self._tail = self._beginning_at_end(text)
        return text[known : len(text) if self._keep_match else len(text) - len(self._tail)]

    def release(self, rest: str) -> str:
        """The last text, and what was held back before it."""
        return rest if self._keep_match else self._tail + rest

    def _first_match(self, text: str, known: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first, beyond the ``known`` characters; of those, the longest."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _beginning_at_end(self, text: str) -> str:
        """The longest end of the text that is a proper beginning of a stop string."""
        end = text[-(self._longest - 1) :] if self._longest > 1 else ""
        if not any(first in end for first in self._firsts):
            return ""
        for start in range(len(end)):
            part = end[start:]
            if any(len(stop) > len(part) and stop.startswith(part) for stop in self._stops):
                return part
        return ""
