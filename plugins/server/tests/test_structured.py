"""``response_format``, ``structured_outputs`` and ``tool_choice`` over HTTP."""

from __future__ import annotations

import json

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "function", "function": {"name": "set", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(running):
    pytest.importorskip("specdec_grammar_xgrammar")
    with running.client() as client:
        yield client
    running.wait_until_idle()


@pytest.fixture(scope="module")
def terse(running):
    """A bias against white space, of which JSON may have any amount and a random model makes a lot."""
    tokenizer = running.llm.get_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    return {str(token): -100 for token, text in enumerate(texts) if any(map(str.isspace, text))}


def content_of(client, **body):
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": 1, "seed": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("speculation", [None, False])
def test_a_json_schema_is_kept(client, terse, speculation):
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
    choice = content_of(client, response_format=wanted, max_tokens=100, speculation=speculation, logit_bias=terse)
    found = json.loads(choice["message"]["content"])
    assert isinstance(found["a"], bool)
    assert found["b"] in ("x", "y")
    assert choice["finish_reason"] == "stop"


def test_vllms_field_and_the_responses_api(client):
    choice = content_of(client, structured_outputs={"choice": ["fox", "dog"]}, max_tokens=20)
    assert choice["message"]["content"] in ("fox", "dog")
    text = {"format": {"type": "json_schema", "name": "pair", "schema": SCHEMA}}
    answer = client.post("/v1/responses", json={"input": "x", "text": text, "max_output_tokens": 400}).json()
    made = answer["output"][0]["content"][0]["text"]
    assert made.lstrip().startswith("{")
    if answer["status"] == "completed":
        assert set(json.loads(made)) == {"a", "b"}


def test_a_named_tool_is_called(client, terse):
    named = {"type": "function", "function": {"name": "set"}}
    choice = content_of(client, tools=[TOOL], tool_choice=named, max_tokens=100, logit_bias=terse)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "set"
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
    required = content_of(client, tools=[TOOL], tool_choice="required", max_tokens=300, logit_bias=terse)
    if required["finish_reason"] == "tool_calls":  # the list of calls may have been too long
        assert required["message"]["tool_calls"][0]["function"]["name"] == "set"


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"jason": {}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
    ],
)
def test_a_constraint_that_cannot_be_is_a_400(client, body):
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4, **body})
    assert response.status_code == 400, response.text


def test_without_a_backend_the_message_says_what_to_install(model, serving):
    with serving(model, plugins={"block": ["xgrammar"]}) as server, server.client() as client:
        body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 4}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "grammar" in response.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2}).status_code == 200
