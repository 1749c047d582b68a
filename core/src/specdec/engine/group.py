"""The ``n`` choices of one user request, and the outputs made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from specdec.metrics.stats import SpecCounter
from specdec.outputs import CompletionOutput, RequestOutput, RequestTimings

if TYPE_CHECKING:
    from specdec.engine.request import Request
    from specdec.types import SpecStats


@define(eq=False)
class RequestGroup:
    """One user request: its prompt and one `Request` for each choice."""

    request_id: str
    prompt: str | None
    requests: list[Request]
    lossless: bool = True
    _sent_text: list[int] = field(init=False)
    _sent_tokens: list[int] = field(init=False)
    _prompt_token_ids: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sent_text = [0] * len(self.requests)
        self._sent_tokens = [0] * len(self.requests)
        first = self.requests[0]
        self._prompt_token_ids = first.token_ids[: first.num_prompt_tokens].tolist()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(request.is_finished for request in self.requests)

    def output(self, *, only_new: bool = False) -> RequestOutput:
        """Everything so far, with what is new since the last call marked as delta.

        Args:
            only_new: leave out what earlier calls gave: text, tokens, origins and log-probabilities are the new ones
                alone, so that the cost of a call does not grow with the output.
        """
        first = self.requests[0]
        completion = self._new_part if only_new else self._completion
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion(i) for i in range(len(self.requests))],
            finished=self.is_finished,
            prompt_logprobs=first.prompt_logprobs,
            spec_stats=self._spec_stats(),
            num_cached_tokens=first.num_cached_tokens,
            timings=self._timings(),
            lossless=self.lossless,
        )

    def _completion(self, i: int) -> CompletionOutput:
        request = self.requests[i]
        token_ids = request.output_token_ids
        text_start, token_start = self._sent_text[i], self._sent_tokens[i]
        self._sent_text[i], self._sent_tokens[i] = len(request.text), len(token_ids)
        return CompletionOutput(
            index=request.index,
            text=request.text,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=None if request.logprobs is None else list(request.logprobs),
            cumulative_logprob=None if request.logprobs is None else request.cumulative_logprob,
            token_origins=list(request.token_origins),
            delta_text=request.text[text_start:],
            delta_token_ids=token_ids[token_start:],
            error=None if request.error is None else str(request.error),
        )

    def _new_part(self, i: int) -> CompletionOutput:
        request = self.requests[i]
        text_start, token_start = self._sent_text[i], self._sent_tokens[i]
        self._sent_text[i], self._sent_tokens[i] = len(request.text), request.num_output_tokens
        text = request.text[text_start:]
        token_ids = request.token_ids[request.num_prompt_tokens + token_start :].tolist()
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=None if request.logprobs is None else request.logprobs[token_start:],
            cumulative_logprob=None if request.logprobs is None else request.cumulative_logprob,
            token_origins=request.token_origins[token_start:],
            delta_text=text,
            delta_token_ids=token_ids,
            error=None if request.error is None else str(request.error),
        )

    def _timings(self) -> RequestTimings:
        timings = [request.timings for request in self.requests]
        arrival = min(t.arrival for t in timings)
        scheduled = [t.first_scheduled for t in timings if t.first_scheduled is not None]
        first_token = [t.first_token for t in timings if t.first_token is not None]
        finished = [t.finished for t in timings if t.finished is not None]
        return RequestTimings(
            queued=min(scheduled) - arrival if scheduled else None,
            first_token=min(first_token) - arrival if first_token else None,
            total=max(finished) - arrival if len(finished) == len(timings) else None,
        )

    def _spec_stats(self) -> SpecStats:
        """The sum over choices."""
        total = SpecCounter()
        for request in self.requests:
            total.add_stats(request.spec.snapshot())
        return total.snapshot()
