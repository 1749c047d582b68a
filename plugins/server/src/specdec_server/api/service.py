"""The engine as the endpoints use it: one served model, its names, time limits, and how requests end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from specdec.config import parse_size
from specdec.sampling.token_text import token_bytes
from specdec.target.tokenizer import names_variable
from specdec_server import __version__
from specdec_server.http.errors import APIError, invalid
from specdec_server.metrics.http import HTTPMetrics

if TYPE_CHECKING:
    from starlette.requests import Request

    from specdec.async_llm import AsyncLLM, OutputKind
    from specdec.outputs import RequestOutput
    from specdec.sampling.params import SamplingParams
    from specdec_server.api.requests import Accepted
    from specdec_server.config import ServerConfig

LONGEST_ID = 200
"""Characters of a request's id that a client may choose."""

TOO_LONG = "context_length_exceeded"
"""``code`` of errors about a prompt, or a prompt and an answer, that do not fit; OpenAI's."""


@define(kw_only=True)
class Ask:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    params: SamplingParams
    request_id: str
    kind: OutputKind
    priority: int = 0
    speculation: Any = None


@frozen
class Cut:
    """Which tokens of a long prompt are kept: vLLM's ``truncate_prompt_tokens`` and ``truncation_side``."""

    length: int
    """At most this many; -1: as many as leave room for the answer."""
    side: str = "left"
    """'left' drops tokens at the beginning, 'right' at the end."""
    room: int = 1
    """Tokens that -1 leaves for the answer."""

    def __call__(self, token_ids: list[int], limit: int) -> list[int]:
        """The tokens that are kept of a prompt, whose answer and it have at most ``limit`` together."""
        length = max(limit - self.room, 0) if self.length == -1 else self.length
        if len(token_ids) <= length:
            return token_ids
        return token_ids[:length] if self.side == "right" else token_ids[len(token_ids) - length :]


@define(eq=False)
class Service:
    """What all endpoints share."""

    llm: AsyncLLM
    config: ServerConfig
    chat_template: str | None = None
    metrics: HTTPMetrics = field(factory=HTTPMetrics)
    started: int = field(factory=lambda: int(time.time()))
    draining: bool = False
    """Whether the server is about to stop: what runs may finish, nothing new begins."""
    _active: set[str] = field(factory=set)

    @property
    def num_active(self) -> int:
        """Prompts that are being answered."""
        return len(self._active)

    async def abort_all(self) -> None:
        """End what runs."""
        for request_id in list(self._active):
            await self.llm.abort(request_id)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use, the first one in answers."""
        return self.config.served_model_name or (self.llm.config.model,)

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint`` of answers; says when the verifier is lossy."""
        lossy = "" if self.llm.lossless else f"-lossy-{self.llm.config.verifier}"
        return f"specdec-{__version__}{lossy}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer of the model."""
        return {} if self.llm.lossless else {"X-Specdec-Lossless": "false"}

    @property
    def max_body_size(self) -> int:
        """Bytes."""
        return parse_size(self.config.max_body_size)

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer.

        Raises:
            APIError: another model is asked for.
        """
        if name is None or name == "" or name in self.names:
            return name or self.names[0]
        served = ", ".join(map(repr, self.names))
        raise APIError(404, f"no model {name!r} here; served: {served}", param="model", code="model_not_found")

    def check_open(self) -> None:
        """Refuse new work while the server stops or when the engine has."""
        if self.draining or not self.llm.is_running:
            reason = "the server is stopping" if self.draining else "the engine has stopped"
            raise APIError(503, reason, code="stopping", headers={"Retry-After": str(self.config.retry_after)})

    async def tokenise(self, prompt: str | list[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; text is tokenised off the event loop."""
        if isinstance(prompt, list):
            return prompt
        self._check_length(len(prompt), "prompt")
        return await asyncio.to_thread(self.llm.tokenise, prompt, add_special_tokens=add_special_tokens)

    def fit(self, token_ids: list[int], cut: Cut | None, param: str) -> list[int]:
        """A prompt that leaves room for an answer, cut if that is asked for.

        Args:
            token_ids: the prompt.
            cut: which tokens to keep of one that is longer; None keeps all.
            param: the name of the field it came in.

        Raises:
            APIError: it is too long for the model.
        """
        limit = self.llm.max_model_len
        if cut is not None:
            token_ids = cut(token_ids, limit)
        if len(token_ids) >= limit:
            raise invalid(
                f"the prompt has {len(token_ids)} tokens. {self._context} Shorten the prompt, or load the model with a "
                "larger max_model_len",
                param,
                TOO_LONG,
            )
        return token_ids

    @property
    def _context(self) -> str:
        """The limit, in the words by which clients know what the error is."""
        limit = self.llm.max_model_len
        return f"This model's maximum context length is {limit} tokens (max_model_len), prompt and output together."

    def _check_length(self, length: int, param: str) -> None:
        """Refuse a text that cannot fit, however it is tokenised: tokenising megabytes takes seconds.

        Raises:
            APIError: it has more characters than the longest tokens could cover.
        """
        tokenizer = self.llm.get_tokenizer()
        table = None if tokenizer is None else token_bytes(tokenizer)
        if table is not None and length > self.llm.max_model_len * table.longest:
            raise invalid(f"the prompt has {length} characters, more than fit. {self._context}", param, TOO_LONG)

    def check_room(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        """Refuse to promise more tokens than the model length leaves.

        Args:
            num_prompt_tokens: of one prompt.
            max_tokens: as the client sent it; None: it did not.
            param: the name of the field.

        Raises:
            APIError: names the numbers.
        """
        room = self.llm.max_model_len - num_prompt_tokens
        if max_tokens is not None and room < max_tokens:
            message = (
                f"{param} is {max_tokens}, but the prompt has {num_prompt_tokens} tokens. {self._context} "
                f"Ask for {room} or fewer, or shorten the prompt"
            )
            raise invalid(message, param, TOO_LONG)

    def template_variables(self, given: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
        """Values for the chat template: those that were sent, and what follows from ``reasoning_effort``.

        Raises:
            APIError: the template has no place for an effort.
        """
        variables = dict(given or {})
        if reasoning_effort is None:
            return variables
        effort = {"reasoning_effort": reasoning_effort, "enable_thinking": reasoning_effort != "none"}
        tokenizer = self.llm.get_tokenizer()
        template = self.chat_template or getattr(tokenizer, "chat_template", None) or ""
        if isinstance(template, dict):
            template = tokenizer.get_chat_template()
        if not any(names_variable(template, name) for name in effort):
            message = f"reasoning_effort: the chat template of {self.names[0]!r} has no place for it; leave it out"
            raise invalid(message, "reasoning_effort")
        return {**effort, **variables}

    async def tokenise_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, off the event loop."""
        variables = dict(options.pop("variables", None) or {})
        reserved = {"tokenize", "return_tensors", "return_dict", "conversation", "padding", "truncation", "tools"}
        reserved |= {"messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "model"}
        reserved |= {"chat_template"}  # a program: only the operator's are run
        wrong = sorted(reserved.intersection(variables))
        if wrong:
            raise invalid(f"chat_template_kwargs cannot set {', '.join(wrong)}", "chat_template_kwargs")
        if self.chat_template is not None:
            variables["chat_template"] = self.chat_template

        def tokenise() -> list[int]:
            self._check_length(num_characters([*messages, *(options.get("tools") or ())]), "messages")
            return self.llm.tokenise_chat(messages, variables=variables, **options)

        return await asyncio.to_thread(tokenise)

    async def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput]:
        """The outputs of one prompt. Leaving early aborts it.

        Raises:
            APIError: it took longer than the server allows, or failed.
            SpecdecError: the engine refuses it.
        """
        self.check_open()
        limit = self.config.request_timeout
        timed_out = False

        def stop() -> None:
            nonlocal timed_out
            timed_out = True
            tasks.append(loop.create_task(self.llm.abort(ask.request_id)))

        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        deadline = loop.time() + limit if limit else None
        timer = loop.call_at(deadline, stop) if deadline else None  # also while nobody reads
        options = {} if ask.speculation is None else {"speculation": ask.speculation}
        generation = self.llm.generate(
            {"prompt_token_ids": ask.token_ids},
            ask.params,
            ask.request_id,
            priority=ask.priority,
            output_kind=ask.kind,
            **options,
        )
        self._active.add(ask.request_id)
        try:
            async with aclosing(generation) as outputs:
                while (output := await _next(outputs, deadline)) is not None:
                    if timed_out and output.finished:
                        raise _timeout(limit)
                    _check(output)
                    yield output
        except TimeoutError:
            raise _timeout(limit) from None
        finally:
            self._active.discard(ask.request_id)
            if timer is not None:
                timer.cancel()

    async def final(self, ask: Ask) -> RequestOutput:
        """The finished output of one prompt."""
        async with aclosing(self.outputs(ask)) as outputs:
            return await anext(outputs)


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def answer_id(prefix: str, request: Request, body: Accepted) -> str:
    """The id of an answer: the client's own behind the prefix, as in vLLM, or a new one.

    Raises:
        APIError: the client's is empty or too long.
    """
    given = request.headers.get("x-request-id", body.request_id)
    if given is None:
        return new_id(prefix)
    if not 0 < len(given) <= LONGEST_ID:
        raise invalid(f"the request id has {len(given)} characters; it must have 1 to {LONGEST_ID}", "request_id")
    return f"{prefix}-{given}"


def engine_id(of_answer: str) -> str:
    """What the engine and its log call a prompt: clients may send the same id twice, and several prompts under one."""
    return f"{of_answer}-{uuid.uuid4().hex[:8]}"


async def _next(outputs: AsyncGenerator[RequestOutput], deadline: float | None) -> RequestOutput | None:
    """The next output, or None after the last.

    Raises:
        TimeoutError: it has not come in time. The engine can abort what it has, but not a grammar that compiles.
    """
    async with asyncio.timeout_at(deadline):
        return await anext(outputs, None)


def num_characters(value: Any) -> int:
    """Characters that JSON values have at least when they are written out: those of their texts, one for all else."""
    total, rest = 0, [value]
    while rest:
        item = rest.pop()
        total += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict | list):
            rest += item.values() if isinstance(item, dict) else item
    return total


def _timeout(limit: float) -> APIError:
    message = f"the request took longer than {limit:g} s (server.request_timeout)"
    return APIError(504, message, code="timeout", headers={"X-Should-Retry": "false"})


def _check(output: RequestOutput) -> None:
    for choice in output.outputs:
        if choice.finish_reason == "error":
            raise APIError(500, choice.error or "the request failed", code="generation_failed")
        if choice.finish_reason == "abort":
            raise APIError(503, "the request was ended by the server", code="aborted")


async def merge(streams: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(index, output) of several streams as they come. No stream gets further ahead than one output."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None, Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    await queue.put((index, output, None))
        except Exception as error:
            await queue.put((index, None, error))
        else:
            await queue.put((index, None, None))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather(work: Sequence[Awaitable[RequestOutput]]) -> list[RequestOutput]:
    """All results; when one fails the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Handler = Callable[..., Awaitable[Any]]
