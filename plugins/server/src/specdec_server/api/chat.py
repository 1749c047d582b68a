"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec_server.api import formats
from specdec_server.api.messages import for_template, last_of_assistant
from specdec_server.api.sampling import prompt_cut, sampling_params
from specdec_server.api.service import Ask, answer_id, engine_id, merge
from specdec_server.api.streaming import respond
from specdec_server.api.tools import HeldText, ToolCall, ToolChoice, find_calls, read_choice
from specdec_server.http.bodies import apart
from specdec_server.http.errors import AsciiJSONResponse, invalid
from specdec_server.http.streams import Events, while_connected

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling.params import SamplingParams
    from specdec_server.api.requests import ChatCompletionRequest
    from specdec_server.api.service import Service


async def create_chat_completion(service: Service, request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    service.check_open()
    model, id_ = service.check_model(body.model), answer_id("chatcmpl", request, body)

    def read() -> tuple[Answer, SamplingParams, list[dict[str, Any]]]:
        choice = read_choice(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
        answer = Answer(service, body, model, id_, choice)
        params = answer.params
        if params.n > service.config.max_choices:
            raise invalid(f"n is {params.n}; this server makes at most {service.config.max_choices} choices", "n")
        return answer, params, for_template(body.messages)

    answer, params, messages = await apart(request, read)
    answer.echoed = last_of_assistant(messages) if body.echo else ""
    token_ids = await service.tokenise_chat(messages, **answer.template_options)
    ask = Ask(
        token_ids=service.fit(token_ids, prompt_cut(body, params), "messages"),
        params=params,
        request_id=engine_id(answer.id),
        kind="delta" if body.stream else "final",
        priority=body.priority or 0,
        speculation=body.speculation,
    )
    service.check_room(len(ask.token_ids), *answer.max_tokens)
    if body.stream:
        return await respond(service, request, merge([service.outputs(ask)]), answer.chunks)
    output = await while_connected(request, service.final(ask))
    return AsciiJSONResponse(answer.whole(output), headers=service.headers)


@define(eq=False)
class Answer:
    """Makes the answers to one chat request."""

    service: Service
    body: ChatCompletionRequest
    model: str
    id: str
    tool_choice: ToolChoice
    echoed: str = ""
    """What the answer's text begins with."""
    created: int = field(factory=lambda: int(time.time()))

    @property
    def max_tokens(self) -> tuple[int | None, str]:
        """The limit that was sent, and the name it was sent under."""
        if self.body.max_completion_tokens is not None:
            return self.body.max_completion_tokens, "max_completion_tokens"
        return self.body.max_tokens, "max_tokens"

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        if body.stream and body.prompt_logprobs is not None:
            raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
        return sampling_params(
            body,
            max_tokens=self.max_tokens[0],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            defaults=self.service.llm.get_default_sampling_params(),
            limits=self.service.config,
            wanted=body.response_format,
            structured=self.tool_choice.constraint(),
        )

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        body = self.body
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise invalid(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        generation = not continued if body.add_generation_prompt is None else body.add_generation_prompt
        return {
            "tools": list(self.tool_choice.tools) if self.tool_choice.is_on else None,
            "add_generation_prompt": generation,
            "continue_final_message": continued,
            "add_special_tokens": bool(body.add_special_tokens),
            "variables": self.service.template_variables(body.chat_template_kwargs, body.reasoning_effort),
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        answer = {
            **self._frame("chat.completion"),
            "choices": [self._whole_choice(choice) for choice in output.outputs],
            "usage": formats.usage([output], num_tokens),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = formats.prompt_logprobs(output)
        return {**answer, **self._prompt(output), **self._stats(output)}

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}

    def _whole_choice(self, choice: CompletionOutput) -> dict[str, Any]:
        text, calls = find_calls(choice.text, self.tool_choice) if self.tool_choice.is_on else (choice.text, [])
        text = self.echoed + text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text.strip() or None if calls else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": self._finish_reason(choice, calls=bool(calls)),
            "stop_reason": choice.stop_reason,
            **self._extras(choice),
        }

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        tokenizer = self.service.llm.get_tokenizer()
        if not self.body.logprobs:
            return None
        by_id = bool(self.body.return_tokens_as_token_ids)
        return formats.chat_logprobs(choice, self.body.top_logprobs or 0, tokenizer, by_id=by_id)

    def _finish_reason(self, choice: CompletionOutput, *, calls: bool) -> str | None:
        made_calls = calls and choice.finish_reason == "stop" and self.tool_choice.mode != "named"
        return "tool_calls" if made_calls else choice.finish_reason

    def _extras(self, choice: CompletionOutput) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.body.return_token_ids:
            extras["token_ids"] = choice.token_ids
        if self.body.return_token_origins:
            extras["token_origins"] = choice.token_origins
        if self.body.return_token_bytes:
            skip_special = self.body.skip_special_tokens is not False
            tokenizer = self.service.llm.get_tokenizer()
            extras["token_bytes"] = formats.bytes_of(choice.token_ids, tokenizer, skip_special=skip_special)
        return extras

    async def chunks(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """The parts of a streamed answer."""
        held: dict[int, HeldText] = {}
        ended: set[int] = set()
        num_tokens = 0
        options = self.body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        last: RequestOutput | None = None
        events = Events(self._frame("chat.completion.chunk"))
        async with aclosing(outputs) as stream:
            async for _, output in stream:
                if last is None:
                    for choice in output.outputs:
                        begin = _chunk(choice.index, {"role": "assistant", "content": self.echoed})
                        yield events({**begin, **self._prompt(output)} if choice.index == 0 else begin)
                last = output
                for choice in output.outputs:
                    if choice.index in ended:
                        continue
                    num_tokens += len(choice.token_ids)
                    usage = formats.usage([output], num_tokens) if continuous else None
                    part = self._part(choice, held.setdefault(choice.index, HeldText(self.tool_choice)), usage)
                    if part is not None:
                        yield events(part)
                    if choice.finish_reason is not None:
                        ended.add(choice.index)
        assert last is not None
        if options and options.include_usage:
            tail = {"usage": formats.usage([last], num_tokens), **self._stats(last)}
            yield events({"choices": [], **tail})
        elif self.body.return_spec_stats:
            yield events({"choices": [], **self._stats(last)})

    def _part(self, choice: CompletionOutput, held: HeldText, usage: dict[str, Any] | None) -> dict[str, Any] | None:
        """What is new in a choice; None when there is nothing to tell."""
        extras = self._extras(choice)
        logprobs = self._logprobs(choice)
        text = held.add(choice.text) if self.tool_choice.is_on else choice.text
        delta: dict[str, Any] = {}
        calls: list[ToolCall] = []
        if choice.finish_reason is not None and self.tool_choice.is_on:
            rest, calls = held.finish()
            text += rest
            if calls:
                delta["tool_calls"] = [call.as_dict(index) for index, call in enumerate(calls)]
        if text:
            delta["content"] = text
        finish_reason = self._finish_reason(choice, calls=bool(calls))
        if not (delta or finish_reason or extras or choice.logprobs):
            return None
        extras["stop_reason"] = choice.stop_reason
        chunk = _chunk(choice.index, delta, logprobs, finish_reason, extras)
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def _stats(self, output: RequestOutput) -> dict[str, Any]:
        return {"spec_stats": formats.spec_stats([output])} if self.body.return_spec_stats else {}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
        }


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    extras: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A part of a streamed answer, without its frame."""
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(extras or {})}
    return {"choices": [choice]}
