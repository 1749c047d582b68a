"""Large bodies: what they cost is bounded before and while they are read."""

from __future__ import annotations

import gc
import json
import random
import threading
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specdec_server.api import completions, requests
from specdec_server.http.bodies import LARGE, num_parts

MANY = 3000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (requests.CompletionRequest, {"prompt": [None] * MANY}),
        (requests.CompletionRequest, {"prompt": [1] * MANY + ["x"] * MANY}),
        (requests.CompletionRequest, {"prompt": [["x"] * MANY] * MANY}),
        (requests.CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (requests.CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * MANY}),
        (requests.CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (requests.CompletionRequest, {"prompt": "x", **dict.fromkeys(map(str, range(MANY)), 1)}),
        (requests.ChatCompletionRequest, {"messages": [1] * MANY}),
        (requests.ChatCompletionRequest, {"messages": [], "tools": [1] * MANY, "modalities": ["x"] * MANY}),
        (requests.ResponsesRequest, {"input": [1] * MANY}),
        (requests.ResponsesRequest, {"input": "x", "include": [1] * MANY}),
        (requests.DetokenizeRequest, {"tokens": ["x"] * MANY}),
    ],
)
def test_one_mistake_is_looked_for_and_not_all(model: type[BaseModel], body: dict[str, Any]) -> None:
    """Millions of errors take minutes to collect, and clients are told the first."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() < 10


def test_the_mistake_is_the_first(client):
    def message(**body: Any) -> str:
        response = client.post("/v1/completions", json={"prompt": "x", **body})
        assert response.status_code == 400
        return str(response.json()["error"]["message"])

    assert message(stop_token_ids=[1, 2, "x", "y"]).startswith("stop_token_ids.2: ")
    assert message(logit_bias={"1": 2, "3": "x", "4": True}).startswith("logit_bias.3: ")
    assert message(first=1, second=2) == "unknown field 'first'."
    assert "messages is" not in message(messages=None, max_tokenz=1)


def exact(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(exact, value.values()))
    return 1 + sum(map(exact, value)) if isinstance(value, list) else 0


def test_parts_are_counted_outside_strings_alone():
    rng = random.Random(0)

    def text() -> str:
        return "".join(rng.choice('\\"[]{}:,n é') for _ in range(rng.randrange(9)))

    for _ in range(2000):
        value = {text(): [text(), {text(): text()}, 1, None, []] for _ in range(3)}
        assert num_parts(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(), 0) == exact(value)
    assert num_parts(b'{"a":"["}', 100) >= 2, "the quick count is no less than the exact one"


def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(model, serving):
    with serving(model, {"max_body_parts": 20}) as server, server.client() as client:
        allowed = client.post("/tokenize", json={"prompt": '[{":' * 30})
        assert allowed.status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            refused = client.post(path, content=b"[[" * 11, headers={"content-type": "application/json"})
            assert refused.status_code == 413
            told = "the body has 22 lists, objects and keys; this server takes at most 20 (server.max_body_parts)"
            assert refused.json()["error"]["message"] == told


@pytest.mark.parametrize("size", [10, LARGE])
def test_large_bodies_are_read_on_a_thread(client, monkeypatch, size):
    read = completions.sampling_params
    threads = []

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*args, **options)

    monkeypatch.setattr(completions, "sampling_params", watched)
    body = {"prompt": "x", "max_tokens": 1, "stop_token_ids": [7] * size}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert ["AnyIO" in name for name in threads] == [size == LARGE]


def test_the_garbage_collector_passes_over_what_is_there_when_the_server_starts(model, serving):
    with serving(model):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_more_tokens_than_a_sequence_has_are_not_decoded(client):
    response = client.post("/detokenize", json={"tokens": [7] * 513})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "tokens has 513 ids; a sequence has at most 512"
