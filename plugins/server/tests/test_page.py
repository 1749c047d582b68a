"""The page at ``/``: its files are there, need nothing from elsewhere, and use only what the API has."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from itertools import pairwise

import pytest

from specdec_server.api.requests import ChatCompletionRequest
from specdec_server.page.routes import FILES

EOS_ID = 1
STATIC = resources.files("specdec_server.page") / "static"


def test_the_page_and_its_files_are_served(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert sorted(named) == ["page/page.css", "page/page.js"]
    for name in named:
        assert client.get(f"/{name}").text == (STATIC / name.removeprefix("page/")).read_text(encoding="utf-8")


def test_the_page_is_not_there_when_switched_off(model, serving):
    with serving(model, {"page": False}) as server, server.client() as client:
        assert client.get("/").status_code == 404


def test_nothing_comes_from_elsewhere():
    for name in FILES:
        assert not re.search(r"https?:|//[a-z]+\.", (STATIC / name).read_text(encoding="utf-8")), name


def test_what_the_script_looks_for_is_in_the_page():
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    wanted = set(re.findall(r'(?:at|list|number)\("([a-z-]+)"', script))
    assert len(wanted) > 15
    assert wanted <= set(re.findall(r'id="([a-z-]+)"', page))


def test_what_the_script_sends_is_what_the_api_takes():
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    sent = script[script.index("  return {\n    messages") :].partition("};")[0]
    names = set(re.findall(r"\b([a-z_]+)(?=[:,])", sent)) - {"true", "include_usage", "number"}
    assert {"messages", "return_token_origins", "speculation"} <= names
    assert names <= set(ChatCompletionRequest.model_fields)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_has_no_syntax_error():
    with resources.as_file(STATIC / "page.js") as file:
        assert subprocess.run(["node", "--check", file]).returncode == 0


def test_a_streams_bytes_and_origins_are_its_text(client):
    body = {"messages": [{"role": "user", "content": "the quick brown fox"}], "temperature": 0, "max_tokens": 40}
    body |= {"return_token_origins": True, "return_token_bytes": True, "ignore_eos": True}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert len(choice["token_bytes"]) == len(choice["token_origins"]) == 40
    made = bytes(byte for token in choice["token_bytes"] for byte in token).decode("utf-8", "replace")
    assert made == choice["message"]["content"]
    origins = choice["token_origins"]
    assert all(origin in (-3, -2, -1, 0, 1, 2, 3) for origin in origins)
    for before, after in pairwise(origins):  # a draft's positions come in order
        assert after < 0 or after == (before + 1 if before >= 0 else 0)


def test_a_special_token_has_bytes_only_when_the_text_has_it(client):
    body = {"prompt": "the quick", "temperature": 0, "max_tokens": 2, "return_token_bytes": True}
    body |= {"allowed_token_ids": [EOS_ID], "ignore_eos": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["token_bytes"]) == ("", [[], []])
    choice = client.post("/v1/completions", json={**body, "skip_special_tokens": False}).json()["choices"][0]
    assert bytes(byte for token in choice["token_bytes"] for byte in token).decode() == choice["text"] != ""
