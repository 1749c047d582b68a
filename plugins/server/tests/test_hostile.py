"""Clients that are slow on purpose, or send what costs much: they harm nobody else."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from contextlib import suppress

import pytest

from specdec.grammar.service import GrammarService
from specdec.grammar.threads import MOST_THREADS
from specdec_server.api.service import num_characters

JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(url: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    connection.settimeout(20)
    return connection


def test_a_body_that_drips_in_is_given_up_as_one_that_does_not_come(model, serving):
    """The limit is on the whole body: no part of it takes longer than the limit here."""
    body = json.dumps({"prompt": "x" * 200, "max_tokens": 1}).encode()
    with serving(model, {"request_timeout": 1}) as server, connect(server.url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        connection.settimeout(0.1)
        answer = b""
        for index in range(len(body)):
            connection.sendall(body[index : index + 1])
            try:
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
        connection.settimeout(20)
        with suppress(ConnectionResetError):  # a byte of the body that came too late
            while part := connection.recv(4096):  # it ends: the server does not hold the connection
                answer += part
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"(server.request_timeout)" in answer


def test_a_compressed_body_is_a_415(client):
    body = gzip.compress(b'{"prompt": "x"}')
    response = client.post("/v1/completions", content=body, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 415
    assert "'gzip' is not understood; send it uncompressed" in response.json()["error"]["message"]
    plain = client.post("/tokenize", content=b'{"prompt": "x"}', headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200


def words(count: int) -> list[str]:
    return [f"word{number}" for number in range(count)]


SCHEMA = {"enum": ["x" * 100] * 3000}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"stop": words(1025)}, "stop has 1025 strings; this server takes at most 1024 (server.max"),
        ("/v1/completions", {"bad_words": words(1025)}, "bad_words has 1025 strings; this server takes at most 1024"),
        (
            "/v1/completions",
            {"stop": "x" * 65537},
            "stop has 65537 characters; this server takes at most 65536 (server.",
        ),
        ("/v1/completions", {"bad_words": ["x" * 65536, "y"]}, "bad_words has 65537 characters; this server takes at"),
        ("/v1/completions", {"structured_outputs": {"regex": "a" * 300_000}}, "300013 characters; this server takes"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "at most 262144 (server.max_grammar_size)",
        ),
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
                "tool_choice": "required",
            },
            "at most 262144 (server.max_grammar_size)",
        ),
    ],
)
def test_what_costs_every_step_or_compiles_for_minutes_has_a_limit(client, path, body, told):
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    response = client.post(path, json={**prompt, **body, "max_tokens": 1})
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_limits_may_be_reached(client):
    body = {"prompt": "x", "max_tokens": 1, "stop": words(1024), "bad_words": words(1024)}
    assert client.post("/v1/completions", json=body).status_code == 200


TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 20_000},
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]},
        {"messages": [{"role": "user", "content": "x", "name": "y" * 100_000}]},
    ],
)
def test_a_conversation_that_cannot_fit_is_refused_before_it_is_tokenised(client, running, monkeypatch, path, body):
    """Rendering and tokenising it takes seconds, in which all other prompts wait."""
    monkeypatch.setattr(running.llm, "tokenise_chat", None)
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "characters, more than fit" in response.json()["error"]["message"]


def test_characters_are_counted_at_any_depth():
    deep: object = "four"
    for _ in range(5000):
        deep = {"a key": [deep]}
    assert num_characters(deep) == 4 + 2 * 5000
    assert num_characters([{"a": "bc", "d": None}, 7]) == 1 + 1 + 2 + 1 + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_compiles_for_too_long_is_given_up(model, serving, monkeypatch, stream):
    """Nothing can abort it, and the engine has not got the request yet."""
    release = threading.Event()
    monkeypatch.setattr(GrammarService, "compile", lambda *_: release.wait(60))
    body = {"prompt": "x", "max_tokens": 5, "stream": stream, "structured_outputs": {"regex": "a+"}}
    with serving(model, {"request_timeout": 0.5}) as server, server.client() as client:
        try:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "timeout"
            assert server.service.num_active == 0
        finally:
            release.set()
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_grammars_that_compile_for_ever_are_few_and_hold_up_nothing_else(model, serving, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(GrammarService, "compile", lambda *_: release.wait(60))
    plain = {"prompt": "x", "max_tokens": 1}
    with serving(model, {"request_timeout": 0.5}) as server, server.client() as client:
        before = {thread for thread in threading.enumerate() if thread.name == "specdec-grammar"}
        try:
            for number in range(MOST_THREADS):
                body = {**plain, "structured_outputs": {"regex": f"a{{{number}}}"}}
                assert client.post("/v1/completions", json=body).status_code == 504
            for _ in range(3):
                refused = client.post("/v1/completions", json={**plain, "structured_outputs": {"regex": "b+"}})
                assert refused.status_code == 429
                assert "still being compiled" in refused.json()["error"]["message"]
                assert "retry-after" in refused.headers
            names = [thread for thread in threading.enumerate() if thread.name == "specdec-grammar"]
            assert len(set(names) - before) == MOST_THREADS
            assert client.post("/v1/completions", json=plain).status_code == 200
        finally:
            release.set()


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


def call(arguments: str) -> bytes:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}], "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "/v1/chat/completions",
            call(nested("[", "]", 50_000)),
            "messages[0].tool_calls[0].function.arguments is nested too deeply",
        ),
        (
            "/v1/chat/completions",
            call("[" + "[]," * 100_000 + "0]"),
            "arguments has 100001 lists, objects and keys; at",
        ),
        ("/v1/chat/completions", call("9" * 5000), "arguments has a number with too many digits"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": 5}]}',
            "content must be a string or a list",
        ),
    ],
)
def test_values_inside_texts_are_refused_as_those_outside(client, path, body, told):
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_schemas_of_any_depth_are_answered(client):
    """Python's limit is met by one part after the other as they get deeper."""
    for depth in range(0, 1100, 20):
        schema = nested('{"items":', "}", depth).replace(":}", ":{}}", 1)
        body = '{"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": %s}}' % (schema or "{}")
        response = client.post("/v1/completions", content=body.encode(), headers=JSON)
        assert response.status_code in (200, 400), (depth, response.text)
        assert response.status_code == 200 or response.json()["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_servers_own_has_the_form_of_the_api(client, running, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(type(running.service), "check_model", fail)
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a bug" not in response.text
