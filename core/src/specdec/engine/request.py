"""One sequence being decoded: its tokens, its place in the KV cache and what has been said about it.

Only the scheduler (places and phases) and `commit` (tokens) change a request.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from specdec.draft_trees import node_depths
from specdec.metrics.stats import SpecCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.grammar.state import RequestGrammar
    from specdec.sampling.logprobs import Logprob
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.stops import StopChecker
    from specdec.speculation import RequestSpeculation

_MASK64 = (1 << 64) - 1


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@define(eq=False)
class RequestDraft:
    """Draft tokens that wait for the request's next step."""

    token_ids: list[int]
    parents: list[int] | None = None
    probs: Tensor | None = None
    num_forced: int = 0
    """How many at the end are not the proposer's: a grammar left no other continuation."""

    @property
    def num_proposed(self) -> int:
        """The tokens of the proposer; they come first."""
        return len(self.token_ids) - self.num_forced

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncated(self, num_tokens: int) -> RequestDraft:
        """The first ``num_tokens`` of it; parents come before children, so a tree stays a tree."""
        if num_tokens >= len(self.token_ids):
            return self
        return RequestDraft(
            self.token_ids[:num_tokens],
            None if self.parents is None else self.parents[:num_tokens],
            None if self.probs is None else self.probs[:num_tokens],
            max(0, num_tokens - self.num_proposed),
        )

    def no_deeper_than(self, depth: int) -> RequestDraft:
        """Without the tokens of which more than ``depth`` would have to be accepted to reach them."""
        if self.parents is None:
            return self.truncated(depth)
        if len(self) <= depth:
            return self
        kept = [node for node, level in enumerate(node_depths(self.parents)) if level <= depth]
        if len(kept) == len(self):
            return self
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return RequestDraft(
            [self.token_ids[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            None if self.probs is None else self.probs[kept],
        )


NO_DRAFT = RequestDraft([])


@define(eq=False)
class Timings:
    """Moments of a request, in seconds of `time.monotonic`."""

    arrival: float = field(factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    """When the newest tokens came, as far as statistics have looked."""
    finished: float | None = None


class Request:
    """One sequence: prompt, output so far, and its state in scheduler and KV cache.

    ``token_ids`` holds prompt and committed output in one buffer. ``num_computed_tokens`` counts positions whose K/V is
    in the cache; between steps a decoding request has ``num_computed_tokens == num_tokens - 1``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: frozenset[int],
        stop_checker: StopChecker,
        max_tokens: int,
        priority: int = 0,
        arrival_index: int = 0,
        index: int = 0,
        speculation: RequestSpeculation | None = None,
        grammar: RequestGrammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.stop_checker = stop_checker
        self.max_tokens = max_tokens
        self.order = (priority, arrival_index)
        self.index = index
        self.speculation = speculation
        self.grammar = grammar

        prompt = np.asarray(prompt_token_ids, dtype=np.int64)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self._tokens = np.empty(len(prompt) + min(max_tokens, 256) + 1, dtype=np.int64)
        self._tokens[: len(prompt)] = prompt
        self.token_pointer = self._tokens.ctypes.data
        """Address of the first token; changes only when the buffer grows."""

        self.phase = Phase.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_indexed_blocks = 0
        """Leading blocks already offered to the prefix cache."""
        self.batch_row = -1
        """Row of this request in the engine's persistent block table; -1 while it holds none."""
        self.draft = NO_DRAFT

        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )
        self.token_origins: list[int] = []
        self.timings = Timings()
        self.spec = SpecCounter()

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [num_tokens]: prompt and committed output, a read-only view."""
        view = self._tokens[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The committed output."""
        return self._tokens[self.num_prompt_tokens : self.num_tokens].tolist()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended for any reason."""
        return self.phase is Phase.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks K/V, so that a draft can follow it."""
        return self.num_computed_tokens == self.num_tokens - 1 and self.num_output_tokens > 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit output tokens."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(max(2 * len(self._tokens), end), dtype=np.int64)
            grown[: self.num_tokens] = self._tokens[: self.num_tokens]
            self._tokens = grown
            self.token_pointer = grown.ctypes.data
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end


def child_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice ``index`` of a request with ``n`` choices; choice 0 keeps the request's own seed.

    SplitMix64 (Steele, Lea and Flood 2014) of seed and index.
    """
    if index == 0:
        return seed & _MASK64
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
