"""What `LLM` and `AsyncLLM` share: an engine, its inputs, and the groups that are running."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from specdec.engine.build import build
from specdec.engine.core import EngineCore
from specdec.engine.inputs import InputProcessor
from specdec.errors import CapacityError, InvalidRequestError
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.group import RequestGroup
    from specdec.engine.request import Request
    from specdec.metrics.stats import EngineStats
    from specdec.speculation import RequestSpeculation


def speculative_settings(settings: Mapping[str, Any] | None, proposer: Proposer | None) -> dict[str, Any]:
    """The argument ``speculative_config`` of an engine that may be handed its proposer as an object, named after its
    class; none when neither is given, and environment variables decide.
    """
    if proposer is not None:
        return {"speculative_config": {"method": type(proposer).__name__, **(settings or {})}}
    return {} if settings is None else {"speculative_config": settings}


class Frontend:
    """Adds, steps and ends groups of requests. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig, proposer: Proposer | None = None) -> None:
        parts = build(config, proposer)
        self.config = parts.config
        self.context = parts.context
        self.tokenizer = parts.target.tokenizer
        self.default_sampling_params = SamplingParams(
            **(parts.target.sampling_defaults if config.generation_config == "auto" else {})
        )
        self.core = EngineCore(parts)
        self.inputs = InputProcessor(
            config,
            parts.target.info,
            parts.target.tokenizer,
            parts.context.max_model_len,
            lossless=parts.verification.verifier.lossless,
            methods=() if parts.drafting is None else parts.drafting.methods,
            num_speculative_tokens=0 if parts.drafting is None else parts.context.num_speculative_tokens,
            constraints=parts.constraints,
        )
        self.groups: dict[str, RequestGroup] = {}
        self._group_of: dict[str, RequestGroup] = {}
        self._names = itertools.count()

    def new_id(self) -> str:
        """A request id that no running request has."""
        return next(name for name in map(str, self._names) if name not in self.groups)

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None,
        priority: int = 0,
        speculation: RequestSpeculation | Mapping[str, Any] | bool | str | None = None,
    ) -> RequestGroup:
        """Check and tokenise one prompt; nothing is queued yet."""
        if request_id is not None and request_id in self.groups:
            raise InvalidRequestError(f"request id {request_id!r} is in use by a running request")
        name = request_id or self.new_id()
        group = self.inputs.group(prompt, params, name, priority=priority, speculation=speculation)
        # The choices of a request have ids of their own, which a user's id may equal.
        taken = next((r.request_id for r in group.requests if r.request_id in self._group_of), None)
        if taken is not None:
            raise InvalidRequestError(f"request id {taken!r} is in use by a running request")
        return group

    def has_room(self, num_requests: int = 1) -> bool:
        """Whether the waiting queue takes that many more."""
        return self.core.num_waiting + num_requests <= max(self.config.max_waiting_requests, num_requests)

    def submit(self, group: RequestGroup) -> None:
        """Queue a prepared group.

        Raises:
            CapacityError: the waiting queue is full.
        """
        if not self.has_room(len(group.requests)):
            raise CapacityError(
                f"{self.core.num_waiting} requests wait already; max_waiting_requests is "
                f"{self.config.max_waiting_requests}. Try again later or raise it"
            )
        for request in group.requests:
            self.core.add(request)
            self._group_of[request.request_id] = group
        self.groups[group.request_id] = group

    def step(self) -> list[RequestGroup]:
        """Run one step; the groups that advanced, each once."""
        return self._groups_of(self.core.step())

    def abort(self, request_id: str) -> RequestGroup | None:
        """End a group now; its output so far stays readable. None when no such group runs."""
        group = self.groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            self.core.abort(request)
        self._drop(group)
        return group

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        return self.core.stats()

    def close(self) -> None:
        """Abort everything and release the engine."""
        self.core.close()
        self.groups.clear()
        self._group_of.clear()

    def _groups_of(self, requests: list[Request]) -> list[RequestGroup]:
        groups = {id(group): group for group in (self._group_of[request.request_id] for request in requests)}
        for group in groups.values():
            if group.is_finished:
                self._drop(group)
        return list(groups.values())

    def _drop(self, group: RequestGroup) -> None:
        self.groups.pop(group.request_id, None)
        for request in group.requests:
            self._group_of.pop(request.request_id, None)
