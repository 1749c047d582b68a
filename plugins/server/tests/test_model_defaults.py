"""Parameters that a request leaves open are the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.testing.models import tiny_model

AUTHORS = {"temperature": 0.3, "top_p": 0.8, "top_k": 3, "min_p": 0.01, "repetition_penalty": 1.5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick brown fox"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the quick brown fox"}]},
}


@pytest.fixture(scope="module")
def client(serving, tmp_path_factory):
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **AUTHORS}))
    with serving(model) as running, running.client() as client:
        yield client


def _text(client: httpx.Client, path: str, **fields: Any) -> str:
    response = client.post(path, json={**BODIES[path], "max_tokens": 24, "seed": 3, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_sent_is_the_models(client: httpx.Client, path: str) -> None:
    assert _text(client, path) == _text(client, path, **AUTHORS)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert _text(client, path) != _text(client, path, **plain), "they do differ"
    assert _text(client, path, temperature=0.9) == _text(client, path, **{**AUTHORS, "temperature": 0.9})


def test_responses_tell_what_was_in_effect(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json={"input": "the quick", "max_output_tokens": 4, "top_p": 0.5}).json()
    assert (answer["temperature"], answer["top_p"]) == (0.3, 0.5)
