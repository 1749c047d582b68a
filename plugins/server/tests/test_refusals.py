"""What is refused: with which status, in which words, and that the server goes on."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from specdec.testing.oracles import SlowProposer, WrongProposer, use_proposer
from specdec_server.config import ServerConfig


def refused(client: httpx.Client, path: str, status: int, **body: Any) -> dict[str, Any]:
    content = json.dumps(body).encode("ascii")  # httpx's own JSON takes no lone surrogates
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "the field 'prompt' is missing"),
        ({"prompt": "x", "temprature": 0}, "unknown field 'temprature'. Did you mean 'temperature'?"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": "7"}, "max_tokens: Input should be a valid integer"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [5, 99999]}, "outside the vocabulary"),
        ({"prompt": [1] * 600}, "the prompt has 600 tokens"),
        (
            {"prompt": "a " * 2_000_000},
            "the prompt has 4000000 characters, more than fit. This model's maximum context length is 512 tokens",
        ),
        ({"prompt": "x", "n": 0}, "n is 0"),
        ({"prompt": "x", "n": 500, "temperature": 1}, "server.max_choices"),
        ({"prompt": "x", "logprobs": 21}, "server.max_logprobs"),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, "outside the vocabulary"),
        ({"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ({"prompt": "x", "best_of": 4}, "best_of is not supported"),
        ({"prompt": "x", "priority": 3}, "scheduling_policy='priority'"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
        ({"prompt": "x", "speculation": {"k": 3}}, "unknown setting 'speculation.k'"),
    ],
)
def test_a_mistake_in_a_body_is_a_400_that_says_what(client, body, told):
    assert told in refused(client, "/v1/completions", 400, **body)["message"]


def test_a_field_of_another_endpoint_is_not_suggested_for_itself(client):
    error = refused(client, "/v1/chat/completions", 400, messages=[{"role": "user", "content": "x"}], best_of=2)
    assert error["message"] == "unknown field 'best_of'."


def test_the_field_is_named_for_programs(client):
    error = refused(client, "/v1/completions", 400, prompt="x", temprature=0)
    assert (error["param"], error["code"], error["type"]) == ("temprature", "unknown_field", "invalid_request_error")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 20, "max_tokens": 10}),
        ("n", {"n": 2, "temperature": 0}),
        ("stop", {"stop": ""}),
        ("logit_bias", {"logit_bias": {"999999": 1}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("structured_outputs", {"structured_outputs": {"regex": ""}}),
    ],
)
def test_a_value_that_is_not_allowed_is_told_by_its_field(client, param, body):
    assert refused(client, "/v1/completions", 400, prompt="x", **body)["param"] == param


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard'"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is understood"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}, "tools[0] must be a function"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}] * 3}, "characters, more than fit"),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
                "structured_outputs": {"choice": ["a"]},
            },
            "structured_outputs and tool_choice both constrain",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}},
            "cannot set tokenize",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            "cannot set messages",
        ),
    ],
)
def test_a_mistake_in_a_conversation_is_a_400_that_says_what(client, body, told):
    assert told in refused(client, "/v1/chat/completions", 400, **body)["message"]


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": [5] * 12}),
        ("/v1/completions", "max_tokens", {"prompt": [[5, 6], [5] * 12]}),
        ("/v1/chat/completions", "max_tokens", {"messages": HELLO}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": HELLO}),
        ("/v1/responses", "max_output_tokens", {"input": "hello"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_model_length_leaves_are_a_400_with_the_numbers(
    client, running, path, field, body, stream
):
    limit = running.llm.max_model_len
    length = 12 if "prompt" in body else len(running.llm.tokenise_chat(HELLO))
    room = limit - length
    error = refused(client, path, 400, **body, **{field: room + 1, "stream": stream})
    assert error["message"] == (
        f"{field} is {room + 1}, but the prompt has {length} tokens. This model's maximum context length is {limit} "
        f"tokens (max_model_len), prompt and output together. Ask for {room} or fewer, or shorten the prompt"
    )
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    if not stream:
        answer = client.post(path, json={**body, field: room, "temperature": 0})
        assert answer.status_code == 200, answer.text


def test_a_prompt_that_leaves_less_than_the_default_of_max_tokens_is_taken(client, running):
    body = {"prompt": [5] * (running.llm.max_model_len - 3), "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": [5] * 600}),
        ("/v1/completions", "prompt", {"prompt": "a " * 2_000_000}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x " * 600}]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x" * 300_000}]}),
        ("/v1/responses", "input", {"input": "x " * 600}),
    ],
)
def test_a_prompt_that_does_not_fit_is_told_by_code_and_words(client, path, param, body):
    """By OpenAI's code and by its words: libraries that fall back to a model with more room look for one of them."""
    error = refused(client, path, 400, **body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "This model's maximum context length is 512 tokens" in error["message"]


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/tokenize", {"messages": HELLO}),
    ],
)
def test_tools_that_the_chat_template_does_not_show_are_a_400(client, running, monkeypatch, path, body):
    monkeypatch.setattr(
        running.service, "chat_template", "{# no tools #}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    message = refused(client, path, 400, **body, tools=[FUNCTION])["message"]
    assert "has no place for tools" in message
    assert "tool_choice 'none'" in message
    if path != "/tokenize":
        refused(client, path, 400, **body, tools=[FUNCTION], tool_choice="required")
        assert client.post(path, json={**body, "tools": [FUNCTION], "tool_choice": "none"}).status_code == 200
    assert client.post(path, json={**body, "tools": []}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 20000, b'{"prompt": NaN}'])
def test_what_is_no_body_is_a_400(client, content):
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_what_is_wrong_with_a_body_as_a_whole_is_said(client):
    for content, kind, told in (
        (b'{"prompt": "\xff"}', "application/json", "the body is not UTF-8: invalid start byte at byte 12"),
        (b'{"prompt": "x"}', "text/plain", "sent with Content-Type: application/json"),
        (b'["prompt"]', "application/json", "the body must be a JSON object"),
    ):
        response = client.post("/v1/completions", content=content, headers={"content-type": kind})
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]


def test_other_paths_methods_and_models(client):
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    error = refused(client, "/v1/completions", 404, prompt="x", model="gpt-9")
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        (
            "POST",
            "/chat/completions",
            404,
            "'/chat/completions' is not served here. Did you mean '/v1/chat/completions'?",
        ),
        ("POST", "/v1/v1/completions", 404, "'/v1/v1/completions' is not served here. Did you mean '/v1/completions'?"),
        ("GET", "/nothing/like/it", 404, "'/nothing/like/it' is not served here."),
        ("GET", "/v1/completions", 405, "GET is not possible for '/v1/completions'; send POST"),
        ("DELETE", "/v1/models", 405, "DELETE is not possible for '/v1/models'; send GET"),
    ],
)
def test_a_wrong_path_or_method_is_told_the_right_one(client, method, path, status, told):
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"] == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"[" * 50_000 + b"]" * 50_000, "the body is nested too deeply"),
        (b"9" * 5000, "the body has a number with too many digits"),
    ],
)
def test_json_that_python_does_not_read_is_told_apart(client, value, told):
    body = b'{"prompt": "x", "extra_args": {"a": ' + value + b"}}"
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == told


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_what_can_be_read_answers_head(client, path):
    response = client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 10


def test_the_server_goes_on_after_all_of_it(client):
    assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200


@pytest.fixture(scope="module")
def strict(model, serving):
    """A server with small limits and keys."""
    limits = {
        "api_key": ("secret", "other"),
        "max_body_size": "2KiB",
        "allowed_origins": ("https://a.example",),
        "retry_after": 3,
    }
    slow = use_proposer(SlowProposer(WrongProposer(5), 0.05))  # so that requests last
    slow["speculative_config"]["speculation"] = "always"
    settings = {"max_num_seqs": 1, "max_waiting_requests": 1, "proposer_time_budget": 0}
    with serving(model, limits, **settings, **slow) as server:
        yield server


def test_keys(strict):
    with strict.client() as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert client.get(path).status_code == 200
        for key in ("secret", "other"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_body_size_with_and_without_a_length(strict):
    body = json.dumps({"prompt": "x" * 3000}).encode()

    def parts():
        yield body[:1000]
        yield body[1000:]

    headers = {"Authorization": "Bearer secret", "content-type": "application/json"}
    with strict.client(headers=headers) as client:
        for content in (body, parts()):
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "server.max_body_size" in response.json()["error"]["message"]


def test_origins(strict):
    with strict.client(headers={"Authorization": "Bearer secret"}) as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        good = client.options("/v1/completions", headers={"Origin": "https://a.example", **asked})
        assert good.headers["access-control-allow-origin"] == "https://a.example"
        bad = client.options("/v1/completions", headers={"Origin": "https://b.example", **asked})
        assert "access-control-allow-origin" not in bad.headers
        seen = client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert seen.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_with_retry_after(strict, stream):
    """One request runs, one waits, the third is refused, streamed or not; afterwards there is room again."""
    import threading

    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "the quick", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with strict.client(headers=headers) as client, strict.client(headers=headers) as other:
        release = threading.Event()

        def hold() -> None:
            with (
                strict.client(headers=headers) as mine,
                mine.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
            ):
                lines = response.iter_lines()  # dropping it would close the connection
                next(lines)
                release.wait(20)

        first = threading.Thread(target=hold)
        first.start()
        while strict.llm.stats().num_running < 1:
            time.sleep(0.002)
        second = threading.Thread(target=lambda: other.post("/v1/completions", json={**body, "max_tokens": 3}))
        second.start()
        while strict.llm.stats().num_waiting < 1:
            time.sleep(0.002)
        response = client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["type"] == "rate_limit_error"
        release.set()
        first.join()
        second.join()
        strict.wait_until_idle()
        assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200


def test_a_request_that_takes_too_long_is_ended(model, serving):
    body = {"prompt": "the quick", "max_tokens": 490, "ignore_eos": True, "temperature": 0, "speculation": False}
    with serving(model, {"request_timeout": 0.05}) as server, server.client() as client:
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 504
        assert "server.request_timeout" in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"
        streamed = client.post("/v1/completions", json={**body, "stream": True}).text
        last = [line for line in streamed.splitlines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_idle()
        assert server.free_blocks() == server.llm.stats().total_blocks
        short = {"prompt": "the", "max_tokens": 1}  # on a busy machine even this may take too long, but not each time
        assert any(client.post("/v1/completions", json=short).status_code == 200 for _ in range(40))


def test_settings_are_checked():
    from specdec.config import structure
    from specdec.errors import ConfigError

    for values, told in (
        ({"prot": 1}, "Did you mean 'port'?"),
        ({"port": 70000}, "from 0 to 65535"),
        ({"max_body_size": "big"}, "server.max_body_size"),
        ({"ssl_keyfile": "k.pem"}, "server.ssl_certfile"),
        ({"allowed_origins": ['["*"]']}, "is no origin"),
        ({"allowed_origins": ["https://a.example/"]}, "an origin without a path"),
    ):
        with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
            structure(ServerConfig, values, "server")


def test_origins_that_exist_are_taken():
    for origin in ("*", "null", "https://a.example", "http://[::1]:3000", "app://name"):
        assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


def test_a_body_that_does_not_come_is_given_up(model, serving):
    with serving(model, {"request_timeout": 0.2}) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            connection.sendall(b"Content-Length: 50\r\n\r\n{")
            connection.settimeout(20)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        with server.client() as client:
            assert client.get("/health").status_code == 200
