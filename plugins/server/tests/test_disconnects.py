"""Clients that go away, read slowly or come in numbers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest

BODY = {"prompt": "the quick brown fox jumps over", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def request_bytes(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _come_and_go(port: int, count: int, seed: int) -> None:
    """Requests of all kinds whose clients leave at random moments, eight at a time."""
    rng = random.Random(seed)
    limit = asyncio.Semaphore(8)

    async def one() -> None:
        async with limit:
            stream = rng.random() < 0.5
            chat = rng.random() < 0.3
            body: dict[str, Any] = {**BODY, "stream": stream, "n": rng.choice([1, 1, 2]), "temperature": 1}
            if chat:
                del body["prompt"]
                body["messages"] = [{"role": "user", "content": "the quick"}]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = request_bytes("/v1/chat/completions" if chat else "/v1/completions", body)
            cut = len(data) if rng.random() < 0.9 else rng.randrange(len(data))  # some leave while they ask
            writer.write(data[:cut])
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 4000)), rng.uniform(0, 0.2))
            if rng.random() < 0.5:
                writer.transport.abort()  # a reset
            else:
                writer.close()

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_disconnects_at_random_moments_leave_nothing_behind(running, count):
    running.wait_until_idle()
    stats = running.llm.stats()
    assert running.free_blocks() == stats.total_blocks
    asyncio.run(_come_and_go(int(running.url.rpartition(":")[2]), count, seed=count))
    running.wait_until_idle(60)
    assert running.free_blocks() == stats.total_blocks
    assert running.llm.is_running
    with running.client() as client:
        assert client.post("/v1/completions", json={**BODY, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_at_once(running, stream):
    """Not when the request would have ended: its blocks are free while most of its tokens were never made."""
    running.wait_until_idle()
    before = running.llm.stats()
    with closing(socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])))) as connection:
        connection.sendall(request_bytes("/v1/completions", {**BODY, "stream": stream, "max_tokens": 450}))
        while not running.llm.stats().num_running:
            time.sleep(0.001)
    running.wait_until_idle()
    made = running.llm.stats().since(before).num_generated_tokens
    assert made < 440
    assert running.free_blocks() == before.total_blocks


def test_a_slow_reader_holds_up_nobody_and_gets_everything(running):
    """It reads nothing while others are served, then finds all of its text; what waits for it is one coalesced part."""
    running.wait_until_idle()
    port = int(running.url.rpartition(":")[2])
    body = {**BODY, "n": 8, "temperature": 1, "seed": 1, "stream": True, "return_token_ids": True, "logprobs": 5}
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with closing(slow), running.client() as client:
        slow.connect(("127.0.0.1", port))
        slow.sendall(request_bytes("/v1/completions", body))
        while not running.llm.stats().num_running:
            time.sleep(0.001)
        running_before = time.monotonic()
        assert client.post("/v1/completions", json={**BODY, "max_tokens": 5}).status_code == 200
        assert time.monotonic() - running_before < 20
        deadline = time.monotonic() + 60
        while running.llm.stats().num_running and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running.llm.stats().num_running == 0  # all made, though nobody has read it
        slow.settimeout(30)
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(65536)
    lines = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    counts = [0] * 8
    for line in lines:
        choice = json.loads(line[6:])["choices"][0]
        counts[choice["index"]] += len(choice["token_ids"])
    assert counts == [300] * 8


@pytest.mark.slow
def test_two_hundred_connections_at_once_all_get_an_answer(running):
    body = {**BODY, "max_tokens": 8}

    async def many() -> list[int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(200)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(many()) == [200] * 200
    running.wait_until_idle()
    assert running.free_blocks() == running.llm.stats().total_blocks
