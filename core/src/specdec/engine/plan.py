"""The scheduler's decision for one step, as a frozen value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from specdec.engine.request import Request, RequestDraft


@frozen(eq=False)
class ScheduledRequest:
    """One request's share of a step: ``num_tokens`` positions from ``num_computed_tokens`` on, drafts last."""

    request: Request
    num_computed_tokens: int
    """Positions computed before this step."""
    num_tokens: int
    """Positions to compute in this step, draft tokens included."""
    draft: RequestDraft
    samples: bool
    """Whether the step reaches the last known token and so emits tokens; prefill chunks but the last do not."""


@frozen(eq=False)
class Plan:
    """One step: who computes what."""

    scheduled: tuple[ScheduledRequest, ...]
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens of requests admitted in this step that prefix caching made unnecessary to compute."""

    @property
    def num_tokens(self) -> int:
        """Positions computed in the step."""
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def num_prompt_tokens(self) -> int:
        """Of these, positions of prompts."""
        return sum(
            max(0, min(s.num_tokens, s.request.num_prompt_tokens - s.num_computed_tokens)) for s in self.scheduled
        )
