"""The objects behind the `propose` and `draft_head` hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from specdec.types import Draft, Needs, ProposalInput, ProposerCapabilities, RequestInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


class Proposer(ABC):
    """Proposes draft tokens for the running requests, once per step.

    All methods run on the engine's thread. Whatever `propose` returns is checked, and a lossless verifier keeps the
    output equal to the target's; a proposer that raises or breaks the contract costs that step its speculation.
    """

    needs: Needs = Needs()
    capabilities: ProposerCapabilities = ProposerCapabilities()

    def load(self, target: Any) -> None:  # noqa: B027 - optional
        """Load weights and bind to the target (`specdec.target.TargetModel`). Called once, before the first request."""

    def start(self, request: RequestInfo) -> None:  # noqa: B027 - optional
        """A request begins. State kept for it is keyed by ``request.request_id``."""

    @abstractmethod
    def propose(self, batch: ProposalInput) -> Draft:
        """Return up to ``batch.max_draft_tokens[r]`` draft tokens for each request.

        Called after the commit of a step and before the next is scheduled. Inputs are read-only. Nothing to propose for
        a request is a count of 0.

        Raises:
            ProposerError: skip speculation for this step.
        """

    def finish(self, request_id: str) -> None:  # noqa: B027 - optional
        """A request ended (finished, aborted or failed): drop what is kept for it."""

    def close(self) -> None:  # noqa: B027 - optional
        """The engine stops."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by purpose, for metrics; empty when nothing worth counting is held."""
        return {}


class DraftHead(ABC):
    """Trained layers that read the target's hidden states and serve a proposer."""

    taps: tuple[int, ...] = ()
    """Decoder layers whose hidden states `fuse` takes, in order."""

    @abstractmethod
    def load(self, checkpoint: Path, target: Any) -> None:
        """Read the weights. Raises ModelLoadError naming missing or surplus tensors."""

    @abstractmethod
    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Combine tapped hidden states, each [T, H], into the head's input [T, H]."""

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """Run the head: int64 [T], [T, H], int64 [T] -> hidden states [T, H]."""

    @abstractmethod
    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, draft vocabulary]."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids; the identity unless the draft vocabulary is reduced."""
        return draft_ids
