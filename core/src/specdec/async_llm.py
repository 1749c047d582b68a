"""`AsyncLLM`: stream many requests from asyncio while one thread runs the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from specdec.cpu.openmp import release_threads
from specdec.errors import EngineDeadError
from specdec.grammar.threads import GrammarThreads
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.frontend import Frontend
    from specdec.engine.group import RequestGroup
    from specdec.metrics.stats import EngineStats
    from specdec.outputs import RequestOutput
    from specdec.speculation import RequestSpeculation


OutputKind = Literal["cumulative", "delta", "final"]
"""What the outputs of a stream hold: everything so far; what is new; or everything, once, at the end."""


class AsyncLLM:
    """Like `LLM`, for asyncio: outputs arrive while they are made, and requests can be aborted.

    The engine runs on a thread of its own, so a slow reader or a long tokenisation never holds up a step. A reader that
    falls behind gets several steps at once: outputs are cumulative.

    Args: as for `specdec.LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        proposer: Proposer | None = None,
        **settings: Any,
    ) -> None:
        from specdec.config.load import from_kwargs_with_origins
        from specdec.config.structure import naming_origins
        from specdec.engine.frontend import speculative_settings

        speculative = speculative_settings(speculative_config, proposer)
        config, origins = from_kwargs_with_origins(model, **speculative, **settings)
        with naming_origins(origins):
            self._start(config, proposer)

    @classmethod
    def from_config(cls, config: EngineConfig, proposer: Proposer | None = None) -> AsyncLLM:
        """An engine for a configuration that is already validated."""
        llm = cls.__new__(cls)
        llm._start(config, proposer)
        return llm

    def _start(self, config: EngineConfig, proposer: Proposer | None) -> None:
        from specdec.engine.frontend import Frontend

        self._engine: Frontend = Frontend(config, proposer)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._grammar_threads = GrammarThreads()
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._stopped = False
        self._fault: BaseException | None = None
        self._last_progress = time.monotonic()
        release_threads()  # this thread has loaded the model; from now on another one runs it
        self._thread = threading.Thread(target=self._loop, name="specdec-engine", daemon=True)
        self._thread.start()

    @property
    def config(self) -> EngineConfig:
        """The configuration the engine was started with."""
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._engine.context.max_model_len

    @property
    def dtype(self) -> str:
        """Type of weights and activations, for example 'bfloat16'."""
        return self._engine.context.dtype

    @property
    def device(self) -> str:
        """Where the model runs: 'cpu', 'cuda', …"""
        return self._engine.context.device

    def get_default_sampling_params(self) -> SamplingParams:
        """What is done where a request says nothing: vLLM's defaults, with what the model's authors set of sampling."""
        return self._engine.default_sampling_params

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, or None when it has none."""
        return self._engine.tokenizer

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        output_kind: OutputKind = "cumulative",
        speculation: RequestSpeculation | Mapping[str, Any] | bool | str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the request's output as it grows; the last one has ``finished`` set.

        Leaving the iteration early (``break`` and ``aclose()``, or cancelling the task) aborts the request.

        Args:
            prompt: as for `LLM.generate`, one of them.
            sampling_params: None takes `get_default_sampling_params`.
            request_id: made when None; must be new.
            priority: smaller first; needs ``scheduling_policy="priority"``.
            output_kind: "cumulative" yields everything so far, again and again; "delta" only what is new (text, tokens,
                log-probabilities), which costs the same however long the output is; "final" yields once.
            speculation: as for `LLM.generate`.

        Raises:
            InvalidRequestError: the prompt or a parameter is wrong.
            CapacityError: the waiting queue is full, or grammars that nobody waits for any more take all threads.
            EngineDeadError: the engine stopped.
        """
        params = sampling_params or self.get_default_sampling_params()
        # The grammar is found again, for as long as it is held here, when the engine's thread asks for it.
        inputs = self._engine.inputs
        run = self._grammar_threads.run if inputs.is_slow(params) else asyncio.to_thread
        tokenised, _grammar = await run(lambda: inputs.prepare(prompt, params))
        stream = _Stream(asyncio.get_running_loop(), output_kind)
        if not self._post(lambda: self._submit(stream, tokenised, params, request_id, priority, speculation)):
            raise self._closed_because()
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._post(lambda: self._abort_stream(stream))

    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        speculation: RequestSpeculation | Mapping[str, Any] | bool | str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Like `generate`, for a conversation through the model's chat template."""
        ids = await asyncio.to_thread(self.tokenise_chat, messages)
        stream = self.generate({"prompt_token_ids": ids}, sampling_params, request_id, speculation=speculation)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    def tokenise(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; may be called from any thread.

        Args:
            prompt: as for `LLM.generate`, one of them.
            add_special_tokens: with those that the tokenizer adds to a text by itself.

        Raises:
            InvalidRequestError: it is neither text nor token ids, or there is no tokenizer.
        """
        tokenised = self._engine.inputs.tokenise(prompt, add_special_tokens=add_special_tokens)
        ids: list[int] = tokenised["prompt_token_ids"].tolist()
        return ids

    def tokenise_chat(self, messages: Any, **template_options: Any) -> list[int]:
        """Token ids of a conversation; may be called from any thread.

        Args:
            messages: dicts with ``role`` and ``content``.
            template_options: for the chat template, as for `specdec.target.tokenizer.apply_chat_template`.

        Raises:
            InvalidRequestError: no chat template, or the messages do not fit it.
        """
        return self._engine.inputs.tokenise_chat(messages, template_options)

    async def abort(self, request_id: str) -> None:
        """End a request now; its stream yields a last output with finish reason 'abort'."""
        self._post(lambda: self._abort(request_id))

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        return self._engine.stats()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests: it has neither been closed nor stopped on a fault."""
        return not (self._stopping or self._stopped)

    @property
    def stalled_seconds(self) -> float:
        """How long requests have waited for a step to end; 0 when there are none."""
        return time.monotonic() - self._last_progress if self._engine.core.has_work else 0.0

    @property
    def lossless(self) -> bool:
        """Whether the verifier keeps the target's distribution."""
        return self._engine.core.parts.verification.verifier.lossless

    @property
    def benchmark_only(self) -> bool:
        """Whether the verifier makes wrong text, for measurements."""
        return self._engine.core.parts.verification.verifier.benchmark_only

    def close(self) -> None:
        """Abort what runs and stop the engine's thread; harmless when called again."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._grammar_threads.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # --- engine thread --------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine's thread; False when it has stopped."""
        with self._wake:
            if self._stopped:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def _closed_because(self) -> EngineDeadError:
        if self._fault is None:
            return EngineDeadError("the engine is closed")
        known = isinstance(self._fault, EngineDeadError)
        cause = str(self._fault) if known else f"the engine stopped on {type(self._fault).__name__}: {self._fault}"
        error = EngineDeadError(cause)
        error.__cause__ = self._fault
        return error

    def _loop(self) -> None:
        try:
            while self._take_commands():
                if self._engine.core.has_work:
                    self._deliver(self._engine.step())
                    self._last_progress = time.monotonic()
        except BaseException as fault:  # whatever it is, readers must not wait for this thread in vain
            self._fault = fault
        try:
            self._engine.close()
        finally:
            self._end_streams()

    def _take_commands(self) -> bool:
        """Run what was posted; wait when there is nothing to do. False when the engine is to stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._engine.core.has_work):
                self._wake.wait()
                self._last_progress = time.monotonic()
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return not self._stopping

    def _submit(
        self,
        stream: _Stream,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        speculation: RequestSpeculation | Mapping[str, Any] | bool | str | None,
    ) -> None:
        if stream.abandoned:
            return
        try:
            group = self._engine.prepare(prompt, params, request_id, priority, speculation)
            self._engine.submit(group)
        except Exception as error:
            stream.fail(error)
            return
        stream.request_id = group.request_id
        self._streams[group.request_id] = stream

    def _abort(self, request_id: str) -> None:
        group = self._engine.abort(request_id)
        if group is not None:
            self._deliver([group])

    def _abort_stream(self, stream: _Stream) -> None:
        stream.abandoned = True
        if stream.request_id is not None and self._streams.pop(stream.request_id, None) is stream:
            self._engine.abort(stream.request_id)

    def _deliver(self, groups: Iterable[RequestGroup]) -> None:
        """Hand outputs to their streams, and wake the readers of each loop with one call."""
        news: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for group in groups:
            stream = self._streams.get(group.request_id)
            if stream is None:
                continue
            if group.is_finished:
                del self._streams[group.request_id]
            elif stream.kind == "final":
                continue
            stream.put(group.output(only_new=stream.kind == "delta"))
            news.setdefault(stream.loop, []).append(stream)
        for loop, streams in news.items():
            _wake(loop, streams)

    def _end_streams(self) -> None:
        """Fail the streams that are open and those whose commands came too late."""
        with self._wake:
            self._stopped = True
            commands = list(self._commands)
            self._commands.clear()
        for stream in self._streams.values():
            stream.fail(self._closed_because())
        self._streams.clear()
        for command in commands:
            command()


class _Stream:
    """The output of one request on its way from the engine's thread to its reader.

    Holds at most one output: what the reader has not taken yet is merged with what comes next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: OutputKind) -> None:
        self.request_id: str | None = None
        self.abandoned = False
        self.loop = loop
        self.kind = kind
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Called on the engine's thread; the reader is woken by `_wake`."""
        with self._lock:
            if self._output is not None:
                _prepend_deltas(output, self._output, self.kind)
            self._output = output

    def fail(self, error: Exception) -> None:
        """Called on the engine's thread."""
        with self._lock:
            self._error = error
        _wake(self.loop, [self])

    async def next(self) -> RequestOutput:
        """Called on the reader's loop: what is new, then the error if there is one."""
        while True:
            await self._news.wait()
            with self._lock:
                self._news.clear()
                output, self._output = self._output, None
                if output is not None:
                    if self._error is not None:
                        self._news.set()
                    return output
                if self._error is not None:
                    raise self._error

    def announce(self) -> None:
        """Called on the reader's loop: there is something to take."""
        self._news.set()


def _wake(loop: asyncio.AbstractEventLoop, streams: Sequence[_Stream]) -> None:
    """Let the readers of streams on one loop know; called on the engine's thread."""
    try:
        loop.call_soon_threadsafe(_announce, streams)
    except RuntimeError:  # the readers' loop is closed
        for stream in streams:
            stream.abandoned = True


def _announce(streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.announce()


def _prepend_deltas(output: RequestOutput, unread: RequestOutput, kind: OutputKind) -> None:
    """Put what the reader has not taken yet in front of what comes next."""
    for new, old in zip(output.outputs, unread.outputs, strict=True):
        new.delta_text = old.delta_text + new.delta_text
        new.delta_token_ids = old.delta_token_ids + new.delta_token_ids
        if kind == "delta":
            new.text, new.token_ids = new.delta_text, new.delta_token_ids
            new.token_origins = old.token_origins + new.token_origins
            if new.logprobs is not None and old.logprobs is not None:
                new.logprobs = old.logprobs + new.logprobs
