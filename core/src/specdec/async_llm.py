"""`AsyncLLM`: stream many requests from asyncio while one thread runs the engine."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from specdec.cpu.openmp import release_threads
from specdec.errors import EngineDeadError
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType

    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.frontend import Frontend
    from specdec.engine.group import RequestGroup
    from specdec.metrics.stats import EngineStats
    from specdec.outputs import RequestOutput


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
        from specdec.config import from_kwargs
        from specdec.engine.frontend import speculative_settings

        speculative = speculative_settings(speculative_config, proposer)
        self._start(from_kwargs(model, speculative_config=speculative, **settings), proposer)

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
        self._streams: dict[str, _Stream] = {}
        self._stopping = False
        self._stopped = False
        self._fault: BaseException | None = None
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
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the request's output as it grows; the last one has ``finished`` set.

        Leaving the iteration early (``break`` and ``aclose()``, or cancelling the task) aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is wrong.
            CapacityError: the waiting queue is full.
            EngineDeadError: the engine stopped.
        """
        params = sampling_params or SamplingParams()
        tokenised = await asyncio.to_thread(self._engine.inputs.tokenise, prompt)
        stream = _Stream(asyncio.get_running_loop())
        if not self._post(lambda: self._submit(stream, tokenised, params, request_id, priority)):
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
    ) -> AsyncGenerator[RequestOutput]:
        """Like `generate`, for a conversation through the model's chat template."""
        from specdec.target.tokenizer import apply_chat_template

        ids = apply_chat_template(self._engine.tokenizer, messages, model=self.config.model)
        async with aclosing(self.generate({"prompt_token_ids": ids}, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request now; its stream yields a last output with finish reason 'abort'."""
        self._post(lambda: self._abort(request_id))

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        return self._engine.stats()

    def close(self) -> None:
        """Abort what runs and stop the engine's thread; harmless when called again."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

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
                    for group in self._engine.step():
                        self._deliver(group)
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
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return not self._stopping

    def _submit(
        self, stream: _Stream, prompt: Any, params: SamplingParams, request_id: str | None, priority: int
    ) -> None:
        if stream.abandoned:
            return
        try:
            group = self._engine.prepare(prompt, params, request_id, priority)
            self._engine.submit(group)
        except Exception as error:
            stream.fail(error)
            return
        stream.request_id = group.request_id
        self._streams[group.request_id] = stream

    def _abort(self, request_id: str) -> None:
        group = self._engine.abort(request_id)
        if group is not None:
            self._deliver(group)

    def _abort_stream(self, stream: _Stream) -> None:
        stream.abandoned = True
        if stream.request_id is not None and self._streams.pop(stream.request_id, None) is stream:
            self._engine.abort(stream.request_id)

    def _deliver(self, group: RequestGroup) -> None:
        stream = self._streams.get(group.request_id)
        if stream is not None:
            stream.put(group.output())
            if group.is_finished:
                del self._streams[group.request_id]

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

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id: str | None = None
        self.abandoned = False
        self._loop = loop
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Called on the engine's thread."""
        with self._lock:
            if self._output is not None:
                _prepend_deltas(output, self._output)
            self._output = output
        self._notify()

    def fail(self, error: Exception) -> None:
        """Called on the engine's thread."""
        with self._lock:
            self._error = error
        self._notify()

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

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the reader's loop is closed
            self.abandoned = True


def _prepend_deltas(output: RequestOutput, unread: RequestOutput) -> None:
    for new, old in zip(output.outputs, unread.outputs, strict=True):
        new.delta_text = old.delta_text + new.delta_text
        new.delta_token_ids = old.delta_token_ids + new.delta_token_ids
