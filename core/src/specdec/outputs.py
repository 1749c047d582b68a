"""What `LLM` and `AsyncLLM` return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from specdec.types import SpecStats

if TYPE_CHECKING:
    from specdec.sampling.logprobs import Logprob


PLAIN, RECOVERED, BONUS, FORCED = -1, -2, -3, -4
"""Origins of tokens that no proposer drafted. The target chose them itself: without a draft, where it left the draft,
after all of a draft. Forced ones were drafted by the engine, because a grammar left no other continuation."""


@define(kw_only=True)
class CompletionOutput:
    """One of the ``n`` choices of a request."""

    index: int
    """Which of the ``n`` it is, from 0."""
    text: str
    """The text so far."""
    token_ids: list[int]
    """The tokens so far."""
    finish_reason: str | None = None
    """'stop', 'length', 'abort' or 'error'; None while the request runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-text token and other reasons."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token the chosen and the most likely tokens, when `SamplingParams.logprobs` is set."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the chosen tokens, when ``logprobs`` are."""
    token_origins: list[int] = field(factory=list)
    """For each token the draft position it was accepted from; or `PLAIN`, `RECOVERED`, `BONUS` or `FORCED`, all below
    0."""
    delta_text: str = ""
    """The text that is new since the previous output of a stream."""
    delta_token_ids: list[int] = field(factory=list)
    """The tokens that are new since the previous output of a stream."""
    error: str | None = None
    """Why the choice failed, when ``finish_reason`` is 'error'."""


@define(kw_only=True)
class RequestTimings:
    """Seconds; None for what has not happened."""

    queued: float | None = None
    """From arrival until first scheduled."""
    first_token: float | None = None
    """From arrival until the first token."""
    total: float | None = None
    """From arrival until the end."""


@define(kw_only=True)
class RequestOutput:
    """A request's prompt and what has been generated for it so far."""

    request_id: str
    """The name the request has in the engine."""
    prompt: str | None
    """The text, when the prompt was given as one."""
    prompt_token_ids: list[int]
    """The prompt as tokens."""
    outputs: list[CompletionOutput]
    """The ``n`` choices."""
    finished: bool
    """Whether all of them have ended."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token after the first, as in `CompletionOutput.logprobs`."""
    spec_stats: SpecStats = field(factory=SpecStats)
    """Drafts of the request, all choices together."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    timings: RequestTimings = field(factory=RequestTimings)
    """When things happened, counted from arrival."""
    lossless: bool = True
    """Whether the verifier keeps the target's distribution."""
