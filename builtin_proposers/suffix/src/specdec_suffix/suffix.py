"""The suffix-decoding proposer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from specdec.drafting import Proposer
from specdec.errors import InvalidRequestError
from specdec.types import Draft, ProposerCapabilities
from specdec_suffix import layout
from specdec_suffix.persistence import CacheFile
from specdec_suffix.responses import ResponseStore
from specdec_suffix.trie import KERNELS, LEAST_CAPACITY, TrieArrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.sampling.params import SamplingParams
    from specdec.types import EngineContext, ProposalInput, RequestInfo
    from specdec_suffix.config import SuffixConfig

SCOPE, STORE = "suffix_scope", "suffix_store"
"""Keys of `SamplingParams.extra_args`: the scope a request reads and is stored in, and whether it is stored."""
MAX_SCOPE_LENGTH = 256
UNSCOPED = ""
"""The scope of requests that name none, where they share one."""


@frozen
class _Running:
    """What is known of a running request."""

    scope: str | None
    """None: it sees nothing but its own text, and is not stored."""
    is_stored: bool
    num_prompt_tokens: int


class SuffixProposer(Proposer):
    """Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) over a request's own text and past responses.

    Two tries count patterns: one the request's prompt and output (`specdec_suffix.local`), one the responses of
    requests that completed in the same scope (`specdec_suffix.store`). `specdec_suffix.drafts` says which continuation
    is proposed. A request chooses its scope, or to leave no trace, with `SamplingParams.extra_args`:
    ``{"suffix_scope": "tenant-a"}``, ``{"suffix_store": False}``.
    """

    request_options = (SCOPE, STORE)

    def __init__(self, config: SuffixConfig, engine: EngineContext) -> None:
        self._config = config
        self._k = engine.num_speculative_tokens
        self._depth = config.suffix_decoding_max_tree_depth
        self._store = ResponseStore(
            depth=self._depth,
            max_responses=config.suffix_decoding_max_cached_requests,
            max_tokens=config.suffix_max_cached_tokens,
        )
        self._options = (
            self._k,
            self._depth,
            float(config.suffix_decoding_max_spec_factor),
            float(config.suffix_decoding_min_token_prob),
            config.suffix_trees,
        )
        """What `propose_all` is told of the configuration."""
        self._file = None if config.suffix_cache_path is None else CacheFile(config, engine)
        self.capabilities = ProposerCapabilities(trees=config.suffix_trees, keeps_finished_requests=True)
        self._state = np.zeros((0, layout.NUM_COLUMNS), dtype=np.int64)
        self._free: list[int] = []
        self._row_of: dict[str, int] = {}
        self._tries: dict[int, TrieArrays] = {}
        self._running: dict[str, _Running] = {}
        self._last_ids: tuple[str, ...] = ()
        self._last_rows = np.zeros(0, dtype=np.int64)

    def load(self, target: Any) -> None:
        """Read the past responses of earlier runs. A file that cannot be used is a warning in the log."""
        KERNELS.load()
        if self._file is not None:
            for scope, tokens in self._file.load():
                self._store.add(scope, tokens)

    def check_request(self, sampling: SamplingParams) -> None:
        """Refuse wrong values of this method's keys in ``extra_args``.

        Raises:
            InvalidRequestError: naming the key, its value and what would be right.
        """
        options = sampling.extra_args or {}
        scope = options.get(SCOPE)
        if scope is not None and not (isinstance(scope, str) and 0 < len(scope) <= MAX_SCOPE_LENGTH):
            raise InvalidRequestError(
                f"extra_args[{SCOPE!r}] is {scope!r}; it must be a string of 1 to {MAX_SCOPE_LENGTH} characters."
            )
        if not isinstance(options.get(STORE, True), bool):
            raise InvalidRequestError(f"extra_args[{STORE!r}] is {options[STORE]!r}; it must be true or false.")

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`; the prompt is indexed at the first `propose`."""
        self.finish(request.request_id)
        self.check_request(request.sampling)
        options = request.sampling.extra_args or {}
        scope = options.get(SCOPE, UNSCOPED if self._config.suffix_share_unscoped else None)
        self._running[request.request_id] = _Running(
            scope, scope is not None and options.get(STORE, True), len(request.prompt_token_ids)
        )

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        asked = self._asked(batch)
        count = asked.shape[1]
        size = count * self._k
        token_ids, confidence = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.float32)
        told = np.empty((layout.NUM_TOLD, size), dtype=np.int32)
        store, propose_all = self._store, KERNELS.function("propose_all")
        while True:
            total = propose_all(
                self._state, asked, store.row, store.address, *self._options, token_ids, confidence, told
            )
            if total >= 0:
                break
            trie = self._tries[int(asked[layout.STATE_ROW, -1 - total])]
            trie.grow(3 * trie.capacity // 2 + 4 * self._depth)
        return Draft(
            token_ids=torch.from_numpy(token_ids[:total]),
            num_draft_tokens=torch.from_numpy(told[layout.LENGTHS, :count]),
            parents=torch.from_numpy(told[layout.PARENTS, :total]) if self._config.suffix_trees else None,
            confidence=torch.from_numpy(confidence[:total]),
        )

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:
        """See `Proposer.complete`: the response is stored, unless the request or the options say otherwise."""
        running = self._running.get(request_id)
        if running is None or not running.is_stored or running.scope is None:
            return
        begin = max(running.num_prompt_tokens - self._config.suffix_stored_prompt_tokens, 0)
        self._store.add(running.scope, token_ids[begin:])
        if self._file is not None and self._file.is_due:
            self._file.save(self._store.responses())

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._running.pop(request_id, None)
        row = self._row_of.pop(request_id, None)
        if row is not None:
            del self._tries[row]
            self._state[row] = 0
            self._free.append(row)
            self._last_ids = ()

    def close(self) -> None:
        """Save the past responses, when there is a file for them."""
        if self._file is not None:
            self._file.save(self._store.responses())

    def memory(self) -> Mapping[str, int]:
        """Bytes of the running requests' indices and of the store of past responses."""
        return {"index": sum(trie.nbytes for trie in self._tries.values()), "responses": self._store.nbytes}

    def stats(self) -> Mapping[str, Any]:
        """What is stored, and how many responses had to leave."""
        return {
            "stored_responses": len(self._store),
            "stored_tokens": self._store.num_tokens,
            "stored_scopes": self._store.num_scopes,
            "evicted_responses": self._store.num_evicted,
        }

    def _asked(self, batch: ProposalInput) -> np.ndarray:
        """Int64 [NUM_ASKED, B]: what `propose_all` is to know of each request."""
        pointers, lengths = batch.token_buffers()
        asked = np.empty((layout.NUM_ASKED, len(batch.request_ids)), dtype=np.int64)
        asked[layout.STATE_ROW] = self._rows(batch.request_ids, lengths)
        asked[layout.ROOT] = [self._root(request_id) for request_id in batch.request_ids]
        asked[layout.TOKENS] = pointers
        asked[layout.LENGTH] = lengths
        asked[layout.LIMIT] = batch.max_draft_tokens
        return asked

    def _root(self, request_id: str) -> int:
        """The root of a request's scope in the trie of past responses."""
        running = self._running.get(request_id)
        return layout.NONE if running is None or running.scope is None else self._store.root(running.scope)

    def _rows(self, request_ids: tuple[str, ...], lengths: Any) -> np.ndarray:
        """Each request's row of the state; the answer is kept, because most steps serve the requests of the last."""
        if request_ids != self._last_ids:
            rows = [
                row if (row := self._row_of.get(request_id)) is not None else self._new_row(request_id, int(length))
                for request_id, length in zip(request_ids, lengths, strict=True)
            ]
            self._last_ids, self._last_rows = request_ids, np.array(rows, dtype=np.int64)
        return self._last_rows

    def _new_row(self, request_id: str, length: int) -> int:
        if not self._free:
            old = len(self._state)
            self._state = np.concatenate([self._state, np.zeros((max(old, 8), layout.NUM_COLUMNS), dtype=np.int64)])
            self._free = list(range(len(self._state) - 1, old - 1, -1))
            for row, trie in self._tries.items():
                trie.attach(self._state[row])
        row = self._row_of[request_id] = self._free.pop()
        self._tries[row] = TrieArrays(self._state[row], LEAST_CAPACITY + length + length // 4, self._depth)
        return row
