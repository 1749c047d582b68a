"""What the sampling stages know about the requests and rows of a step.

`SamplingBatch` holds the requests' parameters as tensors and changes only when the set or order of requests does;
`RowLayout` says which logits row belongs to which request and position, and is new every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from attrs import Factory, field, frozen
from torch import Tensor

from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec.grammar.state import RequestGrammar


class SampledRequest(Protocol):
    """What sampling reads of a request."""

    @property
    def request_id(self) -> str:
        """Unique among the running requests."""

    @property
    def params(self) -> SamplingParams:
        """As returned by `SamplingParams.check_against`."""

    @property
    def seed(self) -> int:
        """64 bits: the key of the request's noise."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [n]: prompt and output committed so far."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """What `min_tokens` masks: the end tokens unless `ignore_eos`, and `SamplingParams.stop_token_ids`."""

    @property
    def grammar(self) -> RequestGrammar | None:
        """Where the output stands in its grammar; present when ``params.structured_outputs`` is."""


@frozen(eq=False, kw_only=True)
class RowLayout:
    """Which request and which position each of the R logits rows of a step belongs to.

    The first row of a request follows its last committed token; row i follows draft token (or tree node) i - 1::

        request 0, 2 drafts      request 1, no draft
        row 0    row 1    row 2  row 3
        anchor   draft 0  draft 1  anchor            (the token each row follows)
    """

    row_start: Tensor
    """int32 [B + 1]: request r owns rows ``row_start[r] .. row_start[r + 1] - 1``."""
    request_index: Tensor
    """int64 [R]: which request each row belongs to."""
    positions: Tensor
    """int64 [R]: the sequence position of the token that the row chooses."""
    num_requests: int
    rows_per_request: np.ndarray = field(
        default=Factory(lambda self: np.diff(self.row_start.cpu().numpy()).astype(np.int64), takes_self=True)
    )
    """int64 [B], on the host."""
    max_depth: int = field(default=Factory(lambda self: int(self.rows_per_request.max(initial=1)) - 1, takes_self=True))
    """At least the number of draft tokens before any row; on the host."""

    @classmethod
    def build(
        cls,
        num_draft_tokens: np.ndarray,
        num_tokens: np.ndarray,
        device: torch.device | str = "cpu",
        parents: np.ndarray | None = None,
    ) -> RowLayout:
        """Lay out one row per request and one per draft token.

        Args:
            num_draft_tokens: int [B].
            num_tokens: int [B]: committed tokens of each request.
            device: where the tensors go.
            parents: int [N] for trees, as in `specdec.types.Draft`.
        """
        counts = num_draft_tokens.astype(np.int64) + 1
        row_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=row_start[1:])
        request_index = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(row_start[-1]) - row_start[request_index]
        depth = offset if parents is None else _tree_depths(offset, parents)
        return cls(
            row_start=torch.from_numpy(row_start.astype(np.int32)).to(device),
            request_index=torch.from_numpy(request_index).to(device),
            positions=torch.from_numpy(num_tokens.astype(np.int64)[request_index] + depth).to(device),
            num_requests=len(counts),
            rows_per_request=counts,
            max_depth=int(depth.max(initial=0)),
        )


def _tree_depths(offset: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Depth of each row's node, 0 for a request's first row; ``offset`` is the row's index within its request."""
    depth = np.zeros(len(offset), dtype=np.int64)
    node = np.flatnonzero(offset > 0)
    # Row of the parent: node j sits at offset j + 1, and parent -1 is the request's first row at offset 0.
    parent_row = node - offset[node] + parents + 1
    while True:
        deeper = depth.copy()
        deeper[node] = depth[parent_row] + 1
        if np.array_equal(deeper, depth):
            return depth
        depth = deeper


@frozen(eq=False, kw_only=True)
class SamplingBatch:
    """The sampling parameters of B requests as tensors, and which stages they need.

    Rows at temperature 0 ignore ``top_k``, ``top_p`` and ``min_p``, so those are off there.
    """

    requests: tuple[SampledRequest, ...]
    device: torch.device
    temperature: Tensor
    """float32 [B]; 0 for greedy requests."""
    top_k: Tensor
    """int64 [B]; 0 is off."""
    top_p: Tensor
    """float64 [B]; 1 is off."""
    log_min_p: Tensor
    """float64 [B]: log of ``min_p``; -inf is off."""
    repetition_penalty: Tensor
    """float32 [B]."""
    presence_penalty: Tensor
    """float32 [B]."""
    frequency_penalty: Tensor
    """float32 [B]."""
    seeds: Tensor
    """int64 [B]: the bits of the requests' 64-bit seeds."""
    all_greedy: bool
    max_top_k: int
    """The largest ``top_k`` when every request with a ``top_p`` has a ``top_k`` too, else 0."""
    truncated: tuple[int, ...]
    """Indices of the requests with ``top_k``, ``top_p`` or ``min_p``."""
    penalized: tuple[int, ...]
    """Indices of the requests with a penalty."""
    biased: tuple[int, ...]
    """Indices of the requests with ``logit_bias`` or ``allowed_token_ids``."""
    with_bad_words: tuple[int, ...]
    with_min_tokens: tuple[int, ...]
    constrained: tuple[int, ...] = ()
    """Indices of the requests with ``structured_outputs``."""

    @classmethod
    def build(cls, requests: Sequence[SampledRequest], device: torch.device | str = "cpu") -> SamplingBatch:
        """Gather the parameters of ``requests``, in the order of the step's batch."""
        params = [r.params for r in requests]
        # The law's parameters, with those that cannot matter at temperature 0 switched off.
        laws = [(0.0, 0, 1.0, 0.0) if p.greedy else (p.temperature, _top_k(p), p.top_p, p.min_p) for p in params]
        temperature, top_k, top_p, min_p = (np.array(c) for c in zip(*laws, strict=True)) if laws else [np.empty(0)] * 4
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p)
        chosen = [k > 0 or p < 1 for _, k, p, _ in laws]
        limited = [k > 0 for _, k, _, _ in laws]

        def tensor(values: Any, dtype: type) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)

        def having(test: Any) -> tuple[int, ...]:
            return tuple(i for i, p in enumerate(params) if test(p))

        return cls(
            requests=tuple(requests),
            device=torch.device(device),
            temperature=tensor(temperature, np.float32),
            top_k=tensor(top_k, np.int64),
            top_p=tensor(top_p, np.float64),
            log_min_p=tensor(log_min_p, np.float64),
            repetition_penalty=tensor([p.repetition_penalty for p in params], np.float32),
            presence_penalty=tensor([p.presence_penalty for p in params], np.float32),
            frequency_penalty=tensor([p.frequency_penalty for p in params], np.float32),
            seeds=tensor([_signed(r.seed) for r in requests], np.int64),
            all_greedy=all(p.greedy for p in params),
            max_top_k=int(top_k.max(initial=0)) if chosen == limited else 0,
            truncated=tuple(i for i, (_, k, p, m) in enumerate(laws) if k > 0 or p < 1 or m > 0),
            penalized=having(lambda p: p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty),
            biased=having(lambda p: p.logit_bias or p.allowed_token_ids is not None),
            with_bad_words=having(lambda p: p.bad_words_token_ids),
            with_min_tokens=having(lambda p: p.min_tokens > 0),
            constrained=having(lambda p: p.structured_outputs is not None),
        )


def _top_k(params: SamplingParams) -> int:
    """0 when off; no vocabulary is larger than 31 bits."""
    return min(max(params.top_k, 0), 2**31 - 1)


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
