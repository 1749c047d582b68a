"""Compiles the grammars that requests ask for, once each, before the requests are queued."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.grammar.state import RequestGrammar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.grammar.interface import CompiledGrammar, GrammarBackend
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.structured import GrammarSpec

MOST_KEPT = 256
"""Compiled grammars kept for requests to come."""

MOST_BYTES = 512 << 20
"""About how much memory they may hold together; the one used last is always kept."""


class GrammarService:
    """The grammar backend of an engine with its cache. Any thread may compile.

    The backend is made when the first request asks for it, unless the engine was told to make it at once, so that an
    installed backend costs nothing where it is not used.
    """

    def __init__(self, make_backend: Callable[[], tuple[GrammarBackend, str]]) -> None:
        """Nothing is made yet.

        Args:
            make_backend: returns the backend and its description, or raises a `SpecdecError` that says what to install.
        """
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._label = ""
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._in_progress: dict[GrammarSpec, threading.Lock] = {}
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        # What a running request or a waiting caller holds is found here even when it is no longer among those kept.
        self._alive: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()

    def backend(self) -> GrammarBackend:
        """The backend, made now if need be.

        Raises:
            SpecdecError: there is none, or it cannot serve this model.
        """
        with self._backend_lock:
            if self._backend is None:
                self._backend, self._label = self._make_backend()
            return self._backend

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar, from the cache when it is there; callers that ask for one grammar share the work.

        Raises:
            InvalidRequestError: the grammar is malformed, or the backend does not know its kind.
            SpecdecError: there is no backend.
        """
        backend = self.backend()
        if spec.kind not in backend.kinds:
            raise InvalidRequestError(
                f"structured_outputs.{spec.kind} is not known to the {self._label}, which has "
                f"{', '.join(sorted(backend.kinds))}."
            )
        with self._lock:
            own = self._in_progress.setdefault(spec, threading.Lock())
        try:
            with own:
                compiled = self._find(spec)
                if compiled is None:
                    compiled = self._compile(backend, spec)
                    self._keep(spec, compiled)
        finally:
            with self._lock:
                self._in_progress.pop(spec, None)
        return compiled

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether `compile` has this grammar at hand."""
        return self._find(spec) is not None

    def follow(
        self, compiled: CompiledGrammar, params: SamplingParams, *, vocab_size: int, end_token_ids: Sequence[int]
    ) -> RequestGrammar:
        """The state of one request at the beginning of its output."""
        assert params.structured_outputs is not None
        return RequestGrammar(
            compiled,
            vocab_size=vocab_size,
            end_token_ids=end_token_ids,
            ignore_eos=params.ignore_eos,
            label=f"grammar {params.structured_outputs.spec().describe()} of the {self._label}",
        )

    def _compile(self, backend: GrammarBackend, spec: GrammarSpec) -> CompiledGrammar:
        try:
            return backend.compile(spec)
        except SpecdecError:
            raise
        except ValueError as error:
            raise InvalidRequestError(f"{spec.describe()} cannot be used: {error}") from error
        except Exception as error:
            raise InvalidRequestError(
                f"{spec.describe()} cannot be compiled by the {self._label}: {type(error).__name__}: {error}"
            ) from error

    def _find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._alive.get(spec)
            if compiled is not None:
                self._kept[spec] = compiled
                self._kept.move_to_end(spec)
            return compiled

    def _keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._alive[spec] = compiled
            self._kept[spec] = compiled
            while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self._num_bytes() > MOST_BYTES):
                self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(compiled.num_bytes() for compiled in self._kept.values())
