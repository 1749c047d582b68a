"""The objects behind the `propose` and `draft_head` hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.types import Draft, DraftOutcome, Needs, ProposalInput, ProposerCapabilities, RequestInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from specdec.sampling.params import SamplingParams
    from specdec.target.bridge import QueryScale
    from specdec.types import AttentionLayer


class Proposer(ABC):
    """Proposes draft tokens for the running requests, once per step.

    All methods run on the engine's thread. Whatever `propose` returns is checked, and a lossless verifier keeps the
    output equal to the target's; a proposer that raises or breaks the contract costs that step its speculation.
    """

    needs: Needs = Needs()
    """What it must be given beyond the texts (`specdec.types.Needs`), such as hidden states; nothing when not set."""
    capabilities: ProposerCapabilities = ProposerCapabilities()
    """What its drafts may be (`specdec.types.ProposerCapabilities`); chains without probabilities when not set."""
    methods: tuple[str, ...] = ()
    """Names that a request may choose among (`specdec.RequestSpeculation`) beside the engine's own method; for
    proposers made of several."""
    request_options: tuple[str, ...] = ()
    """Keys of `SamplingParams.extra_args` that the proposer reads."""

    def load(self, target: Any) -> None:  # noqa: B027 - optional
        """Load weights and bind to the target (`specdec.target.TargetModel`). Called once, before the first request."""

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in K/V layers of the proposer's own which share the target's block tables.

        ``kv_cache_memory`` pays for them together with the target's. Asked before `load`.
        """
        return 0

    def check_request(self, sampling: SamplingParams) -> None:  # noqa: B027 - optional
        """Refuse wrong values of `request_options` before a request is queued. May be called from any thread.

        Raises:
            InvalidRequestError: with a message for the user.
        """

    def start(self, request: RequestInfo) -> None:  # noqa: B027 - optional
        """A request begins. State kept for it is keyed by ``request.request_id``."""

    @abstractmethod
    def propose(self, batch: ProposalInput) -> Draft:
        """Return up to ``batch.max_draft_tokens[r]`` draft tokens for each request.

        Called after the commit of a step and before the next is scheduled: for the requests that can take a draft, or
        with none of them when ``needs.every_step``. Inputs are read-only. Nothing to propose for a request is a count
        of 0.

        Raises:
            ProposerError: skip speculation for this step.
        """

    def record(self, outcome: DraftOutcome) -> None:  # noqa: B027 - optional
        """Learn what became of the drafts of the last step.

        Called after the commit of a step that verified drafts, before `propose` and before `finish` of requests that
        ended in the step. Proposers that do not override it cost nothing.
        """

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:  # noqa: B027 - optional
        """A request ended by itself (an end token, a stop, its length); for methods that learn from responses.

        Called before `finish`. What is kept must not refer to the request, and is declared by
        ``ProposerCapabilities.keeps_finished_requests``; with it, requests for which no draft was ever asked are
        started for this call.

        Args:
            request_id: a request that was started.
            token_ids: int64 [n], read-only and to be copied: the prompt and the whole output.
        """

    def finish(self, request_id: str) -> None:  # noqa: B027 - optional
        """A request ended (finished, aborted or failed): drop what is kept for it.

        For a request that ended in a step this comes after the `propose` of that step.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """The engine stops."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by purpose, for metrics; empty when nothing worth counting is held."""
        return {}

    def stats(self) -> Mapping[str, Any]:
        """Counters of the proposer's own since it was made, for ``EngineStats.proposer``.

        Numbers, strings, lists and mappings with string keys of these. A proposer with others in it has their counters
        under ``members``, by name, each with ``num_drafts``, ``num_draft_tokens``, ``num_accepted_tokens``,
        ``num_accepted_tokens_per_pos`` and ``propose_seconds``; `specdec bench` and ``--stats`` show those.
        """
        return {}


@frozen(eq=False)
class MaskRow:
    """What a row takes whose token and hidden state are not known yet, because it is drafted in the same pass."""

    token_id: int
    """The mask token, a target id."""
    hidden_states: tuple[Tensor, ...]
    """Each [1, H]: what `DraftHead.fuse` takes in place of the target's hidden states."""


class DraftHead(ABC):
    """Trained layers that read the target's hidden states and serve a proposer.

    A head of the EAGLE family runs over rows. Row i belongs to position i of a text: it takes the target's hidden state
    there and the token at position i + 1, and predicts the token at position i + 2. Where the target has not been yet,
    the head's own output of the row before takes the place of the hidden state. Its layers attend through
    `specdec.target.bridge.attend` over K/V of their own, which share slots and block tables with the target's.
    """

    taps: tuple[int, ...] = ()
    """Decoder layers whose output hidden states `fuse` takes, in this order. Empty: it takes the final hidden states
    alone."""
    attention_layers: tuple[AttentionLayer, ...] = ()
    """The head's own attention layers; ``index`` counts from 0."""
    query_scales: Mapping[int, QueryScale] = {}
    """Layers whose queries are scaled by position."""
    draft_vocab_size: int
    """Width of `logits`."""
    mask_row: MaskRow | None = None
    """Of a head that drafts all tokens of a chain in one pass (P-EAGLE): after the rows with the target's hidden states
    come rows of this kind, one for each further draft token. None: it drafts one token after another."""

    @abstractmethod
    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Turn the target's hidden states, each [T, H], into the head's input [T, h]; once for every row."""

    @abstractmethod
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """Run the layers over packed rows, inside an attention context.

        Args:
            token_ids: int64 [T], target ids: of each row the token that follows it.
            hidden_states: [T, h]: from `fuse`, or the output of the row before.
            positions: int64 [T], the rows' own positions.
            step: how many rows behind the last one with the target's hidden states; 0 for rows that have them, and for
                those of `mask_row` behind them.

        Returns:
            [T, h], for `logits` and for the rows that follow.
        """

    @abstractmethod
    def logits(self, hidden_states: Tensor) -> Tensor:
        """Outputs of `forward` [R, h] -> [R, draft_vocab_size]."""

    target_ids: Tensor | None = None
    """int64 [draft_vocab_size]: the target ids of a reduced draft vocabulary, ascending; None when the two are one."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def memory(self) -> Mapping[str, int]:
        """Bytes of the head's own weights, by purpose."""
        return {}
