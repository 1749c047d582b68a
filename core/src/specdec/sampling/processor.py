"""The interface of logits processors: code of others that changes logits before a token is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specdec.sampling.batch import SampledRequest
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.rows import StepRows


class LogitsProcessor(ABC):
    """Changes the logits of the requests it applies to, row by row, before the built-in options do.

    With speculation a step has several rows of one request: the first follows its last committed token, each other one
    a draft token. A processor must change a row exactly as if all draft tokens before it had been emitted, and as if
    there were no others: it may look at `ProcessorRows`, at nothing it remembers from another row. What it keeps for a
    request must follow from committed tokens alone, because draft tokens may be rejected; `ProcessorRows.request_ids`
    is the key.

    All methods but `check` run on the engine's thread. When `applies` or `process` raises, the requests that the
    processor applies to fail, and others go on.
    """

    name: ClassVar[str] = ""
    """What messages call it: the entry point's name."""

    def check(self, params: SamplingParams) -> None:  # noqa: B027 - optional
        """Refuse bad arguments (``params.extra_args``) before a request is queued. May be called from any thread.

        Raises:
            InvalidRequestError: with a message for the user.
        """

    def applies(self, params: SamplingParams) -> bool:
        """Whether requests with these parameters are changed at all; asked when the set of running requests changes.

        Requests it does not apply to cost nothing, and a step without any skips the processor.
        """
        return True

    @abstractmethod
    def process(self, logits: Tensor, rows: ProcessorRows) -> None:
        """Change rows in place.

        Args:
            logits: float32 [R, V], the rows of the requests that the processor applies to, before any other option was
                applied. -inf forbids a token; later stages (allowed ids, bad words, grammars, `min_tokens`) may forbid
                more, and penalties, temperature and top-k, top-p, min-p come after that.
            rows: what stands before each row; read-only.
        """

    def forget(self, request_id: str) -> None:  # noqa: B027 - optional
        """A request ended: drop what is kept for it. Also called for requests that it never applied to."""


class ProcessorRows:
    """What a `LogitsProcessor` sees besides the logits: R rows of B requests, all in NumPy arrays on the host."""

    def __init__(self, step: StepRows, requests: Sequence[int]) -> None:
        """Look at some requests of a step.

        Args:
            step: all rows of the step.
            requests: indices of the requests the processor applies to, ascending.
        """
        self._step = step
        self._indices = tuple(requests)
        self._requests: tuple[SampledRequest, ...] = tuple(step.batch.requests[r] for r in requests)

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.row_start[-1])

    @cached_property
    def request_ids(self) -> tuple[str, ...]:
        """One per request. The ``n`` choices of a request have ids of their own."""
        return tuple(request.request_id for request in self._requests)

    @cached_property
    def params(self) -> tuple[SamplingParams, ...]:
        """One per request; a processor's own arguments are in ``extra_args``."""
        return tuple(request.params for request in self._requests)

    @cached_property
    def token_ids(self) -> tuple[np.ndarray, ...]:
        """int64 [n] per request, read-only: prompt and committed output, without draft tokens."""
        return tuple(request.token_ids for request in self._requests)

    @cached_property
    def num_prompt_tokens(self) -> np.ndarray:
        """int64 [B]: how many of ``token_ids`` are the prompt."""
        return np.array([request.num_prompt_tokens for request in self._requests], dtype=np.int64)

    @cached_property
    def row_start(self) -> np.ndarray:
        """int64 [B + 1]: request b owns rows ``row_start[b] .. row_start[b + 1] - 1``."""
        starts = np.zeros(len(self._indices) + 1, dtype=np.int64)
        np.cumsum(self._step.layout.rows_per_request[list(self._indices)], out=starts[1:])
        return starts

    @cached_property
    def request_index(self) -> np.ndarray:
        """int64 [R]: which request each row belongs to."""
        return np.repeat(np.arange(len(self._indices)), np.diff(self.row_start))

    @cached_property
    def num_drafted(self) -> np.ndarray:
        """int64 [R]: how many draft tokens stand before each row."""
        return (self.drafted >= 0).sum(axis=1)

    @cached_property
    def num_output_tokens(self) -> np.ndarray:
        """int64 [R]: output tokens before each row, draft tokens included."""
        committed = np.array([len(tokens) for tokens in self.token_ids], dtype=np.int64) - self.num_prompt_tokens
        return committed[self.request_index] + self.num_drafted

    @cached_property
    def drafted(self) -> np.ndarray:
        """int64 [R, D]: the draft tokens before each row, first one first, padded on the right with -1.

        In a tree those on the path to the row's node; D is the longest such path.
        """
        paths = [path for r in self._indices for path in _paths(*self._step.draft_of(r))]
        longest = max(map(len, paths), default=0)
        table = np.full((len(paths), longest), -1, dtype=np.int64)
        for row, path in zip(table, paths, strict=True):
            row[: len(path)] = path
        return table

    def tokens_before(self, row: int) -> np.ndarray:
        """int64 [n]: everything before one row: prompt, committed output and draft tokens. Copies; for short texts."""
        before = self.token_ids[self.request_index[row]]
        return np.concatenate([before, self.drafted[row, : self.num_drafted[row]]])


def _paths(token_ids: Sequence[int], parents: Sequence[int] | None) -> list[list[int]]:
    """The draft tokens before each row of one request: none, then those up to and with each node."""
    paths: list[list[int]] = [[]]
    for node, token in enumerate(token_ids):
        above = node if parents is None else parents[node] + 1
        paths.append([*paths[above], token])
    return paths
