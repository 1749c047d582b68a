"""Answers have every field that the types of OpenAI's own client require, with values of the right type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

openai = pytest.importorskip("openai")
pytest.importorskip("specdec_grammar_xgrammar")
from openai.types import Completion, Model  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

PARAMETERS = {"const": 7}
TOOL = {"type": "function", "function": {"name": "set", "parameters": PARAMETERS}}
NAMED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "set"}}}
CHAT = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 6, "temperature": 0}
RESPONSE = {"input": "the quick", "max_output_tokens": 6, "temperature": 0}
RESPONSE_TOOL = {"type": "function", "name": "set", "parameters": PARAMETERS, "strict": True}
RESPONSE_NAMED = {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "set"}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/completions", Completion, {"prompt": "the", "max_tokens": 4, "logprobs": 2}),
        ("/v1/chat/completions", ChatCompletion, {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", ChatCompletion, {**CHAT, **NAMED}),
        ("/v1/responses", Response, RESPONSE),
        ("/v1/responses", Response, {**RESPONSE, **LOGPROBS}),
        ("/v1/responses", Response, {**RESPONSE, **RESPONSE_NAMED}),
    ],
)
def test_whole_answers(client, path, kind, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    TypeAdapter(kind).validate_python(answer.json())


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/chat/completions", ChatCompletionChunk, {**CHAT, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", ChatCompletionChunk, {**CHAT, **NAMED}),
        ("/v1/responses", ResponseStreamEvent, {**RESPONSE, **LOGPROBS}),
        ("/v1/responses", ResponseStreamEvent, {**RESPONSE, **RESPONSE_NAMED}),
    ],
)
def test_events(client, path, kind, body):
    checker: TypeAdapter[Any] = TypeAdapter(kind)
    for event in sent(client, path, body):
        checker.validate_python(event)


def sent(client: Any, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def test_the_model(client):
    TypeAdapter(Model).validate_python(client.get("/v1/models").json()["data"][0])


def test_its_helpers_read_streamed_calls(running):
    """They join deltas to calls and items."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        with client.chat.completions.stream(model="tiny", **CHAT, **NAMED) as stream:
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("set", "7")]
        with client.responses.stream(model="tiny", **RESPONSE, **RESPONSE_NAMED) as stream:
            output = stream.get_final_response().output
        assert [(item.name, item.arguments) for item in output] == [("set", "7")]
        turn = [{"role": "user", "content": "x"}, *(item.model_dump() for item in output)]
        turn.append({"type": "function_call_output", "call_id": output[0].call_id, "output": "done"})
        assert client.responses.create(model="tiny", input=turn, max_output_tokens=2).object == "response"
