"""``POST /v1/responses``: the basic part of OpenAI's responses API. Nothing is stored between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec_server.api import formats
from specdec_server.api.messages import for_template, text_of
from specdec_server.api.requests import LOGPROBS, JSONSchema, ResponseFormat
from specdec_server.api.sampling import sampling_params
from specdec_server.api.service import Ask, answer_id, engine_id, new_id
from specdec_server.api.streaming import respond
from specdec_server.api.tools import HeldText, ToolCall, ToolChoice, find_calls, read_choice
from specdec_server.http.bodies import apart
from specdec_server.http.errors import AsciiJSONResponse, invalid
from specdec_server.http.streams import event, while_connected

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling.params import SamplingParams
    from specdec_server.api.requests import ResponsesRequest
    from specdec_server.api.service import Service


async def create_response(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answer an input, a text or a conversation."""
    service.check_open()
    model, id_ = service.check_model(body.model), answer_id("resp", request, body)

    def read() -> tuple[Answer, SamplingParams, list[dict[str, Any]]]:
        choice = read_choice(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
        answer = Answer(service, body, model, id_, choice)
        return answer, answer.params, conversation(body)

    answer, params, messages = await apart(request, read)
    choice, effort = answer.tool_choice, body.reasoning.effort if body.reasoning else None
    token_ids = await service.tokenise_chat(
        messages,
        tools=list(choice.tools) if choice.is_on else None,
        variables=service.template_variables(body.chat_template_kwargs, effort),
    )
    ask = Ask(
        token_ids=service.fit(token_ids, None, "input"),
        params=params,
        request_id=engine_id(answer.id),
        kind="delta" if body.stream else "final",
        priority=body.priority or 0,
        speculation=body.speculation,
    )
    service.check_room(len(ask.token_ids), body.max_output_tokens, "max_output_tokens")
    if body.stream:
        return await respond(
            service, request, service.outputs(ask), answer.events, done=b"", on_error=answer.error_event
        )
    output = await while_connected(request, service.final(ask))
    text, calls = output.outputs[0].text, list[ToolCall]()
    if answer.tool_choice.is_on:
        text, calls = find_calls(text, answer.tool_choice)
    logprobs, num_tokens = answer.logprobs(output.outputs[0]), len(output.outputs[0].token_ids)
    return AsciiJSONResponse(answer.whole(output, text, calls, logprobs, num_tokens), headers=service.headers)


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """``instructions`` and ``input`` as messages for the chat template."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_message(item, f"input[{number}]") for number, item in enumerate(body.input)]
    return for_template(messages)


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An input item as a message of the chat API."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(item.get("output"), where)}
    raise invalid(f"{where} is of type {kind!r}; known are message, function_call and function_call_output", "input")


@define(eq=False)
class Answer:
    """Makes the answers to one request."""

    service: Service
    body: ResponsesRequest
    model: str
    id: str
    tool_choice: ToolChoice
    message_id: str = field(factory=lambda: new_id("msg"))
    created: int = field(factory=lambda: int(time.time()))
    _sequence: int = 0

    @cached_property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        body = self.body
        if body.top_logprobs and not self._has_logprobs:
            raise invalid(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
        return sampling_params(
            body,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if self._has_logprobs else None,
            defaults=self.service.llm.get_default_sampling_params(),
            limits=self.service.config,
            wanted=self._format(),
            structured=self.tool_choice.constraint(),
        )

    @property
    def _has_logprobs(self) -> bool:
        return LOGPROBS in (self.body.include or ())

    def logprobs(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        """Those of new tokens, when the client asked for them."""
        if not self._has_logprobs:
            return []
        tokenizer = self.service.llm.get_tokenizer()
        made = formats.chat_logprobs(choice, self.body.top_logprobs or 0, tokenizer, by_id=False)
        return [] if made is None else list(made["content"])

    def _format(self) -> ResponseFormat | None:
        wanted = self.body.text.format if self.body.text else None
        if wanted is None:
            return None
        schema = JSONSchema(schema=wanted.schema_) if wanted.type == "json_schema" else None
        return ResponseFormat(type=wanted.type, json_schema=schema)

    def whole(
        self,
        output: RequestOutput,
        text: str,
        calls: list[ToolCall],
        logprobs: list[dict[str, Any]],
        num_tokens: int,
    ) -> dict[str, Any]:
        """The finished response.

        Args:
            output: the last one of the engine.
            text: of the message.
            calls: beside it.
            logprobs: of all tokens, those of calls included; none when they were not asked for.
            num_tokens: tokens that were made.
        """
        complete = output.outputs[0].finish_reason == "stop"
        status = "completed" if complete else "incomplete"
        items = [self._message(text, status, logprobs)] if text or not calls else []
        items += [_call_item(call) for call in calls]
        usage = formats.usage([output], num_tokens)
        return {
            **self._frame(status),
            "completed_at": int(time.time()) if complete else None,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": items,
            "usage": _usage(usage),
        }

    def _message(self, text: str, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text, logprobs)],
        }

    def _frame(self, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "background": False,
            "store": False,
            "service_tier": "default",
            "temperature": self.params.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
            "user": body.user,
        }

    def _text_format(self) -> dict[str, Any]:
        wanted = self.body.text.format if self.body.text else None
        return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)

    async def events(self, outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[bytes]:
        """The events of a streamed response."""
        place = {"output_index": 0, "content_index": 0, "item_id": self.message_id}
        held, text, num_tokens = HeldText(self.tool_choice), "", 0
        calls: list[ToolCall] = []
        logprobs, num_sent = list[dict[str, Any]](), 0
        last: RequestOutput | None = None
        yield self._event("response.created", response=self._frame("in_progress"))
        yield self._event("response.in_progress", response=self._frame("in_progress"))
        async with aclosing(outputs) as stream:
            async for output in stream:
                last = output
                choice = output.outputs[0]
                num_tokens += len(choice.token_ids)
                logprobs += self.logprobs(choice)
                new = held.add(choice.text) if self.tool_choice.is_on else choice.text
                if choice.finish_reason is not None and self.tool_choice.is_on:
                    rest, calls = held.finish()
                    new += rest
                if new and not text:
                    for part in self._begin_message(place):
                        yield part
                text += new
                if new:
                    delta = {"delta": new, "logprobs": logprobs[num_sent:]}
                    num_sent = len(logprobs)
                    yield self._event("response.output_text.delta", **place, **delta)
        assert last is not None
        whole = self.whole(last, text, calls, logprobs, num_tokens)
        if not text and not calls:
            for part in self._begin_message(place):
                yield part
        if text or not calls:
            for part in self._end_message(place, text, whole["output"][0]):
                yield part
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                for part in self._call(index, item):
                    yield part
        yield self._event(f"response.{whole['status']}", response=whole)

    def _begin_message(self, place: dict[str, Any]) -> list[bytes]:
        item = {**self._message("", "in_progress", []), "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=_part("", [])),
        ]

    def _call(self, index: int, item: dict[str, Any]) -> list[bytes]:
        begun = {**item, "status": "in_progress", "arguments": ""}
        place = {"output_index": index, "item_id": item["id"]}
        name, arguments = item["name"], item["arguments"]
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event("response.function_call_arguments.done", **place, name=name, arguments=arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _end_message(self, place: dict[str, Any], text: str, item: dict[str, Any]) -> list[bytes]:
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=item["content"][0]["logprobs"]),
            self._event("response.content_part.done", **place, part=item["content"][0]),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def error_event(self, body: dict[str, Any]) -> bytes:
        """The event for an error that comes too late for a status."""
        error = body["error"]
        return self._event("error", message=error["message"], code=error["code"], param=error["param"])

    def _event(self, kind: str, /, **content: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **content}, kind)


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": new_id("call"),
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
