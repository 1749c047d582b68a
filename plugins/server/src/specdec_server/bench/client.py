"""One request to a server with OpenAI's API, and the moments at which its answer came."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@define(kw_only=True)
class Result:
    """What happened to one request. Moments are seconds of `time.perf_counter`."""

    started: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(factory=list)
    """When each piece with text came."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str | None = None
    spec_stats: dict[str, Any] | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0] - self.started if self.arrivals else 0.0

    @property
    def e2e(self) -> float:
        """End to end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.num_output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces."""
        return [late - early for early, late in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Result:
    """Send one streamed request and read its answer; what goes wrong stands in the result."""
    result = Result(started=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {message_of(await response.text())}"
            else:
                await _read(response, result)
    except TimeoutError:
        result.error = "took longer than --timeout"
    except (aiohttp.ClientError, ValueError, OSError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = time.perf_counter()
    return result


def message_of(body: str) -> str:
    """What an answer with an error says: its message, when it has OpenAI's form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300]


async def _read(response: aiohttp.ClientResponse, result: Result) -> None:
    num_pieces, is_whole = 0, False
    async for data in _events(response.content):
        now = time.perf_counter()
        if data == b"[DONE]":
            is_whole = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            result.error = str(chunk["error"].get("message", chunk["error"]))
            return
        for choice in chunk.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content")
            if piece:
                num_pieces += 1
                result.text += piece
                result.arrivals.append(now)
        if usage := chunk.get("usage"):
            result.num_prompt_tokens = usage["prompt_tokens"]
            result.num_output_tokens = usage["completion_tokens"]
        result.spec_stats = chunk.get("spec_stats", result.spec_stats)
    if not is_whole:
        result.error = "the stream ended before it was complete"
    if not result.num_output_tokens:  # a server that does not count: one token a piece is a guess
        result.num_output_tokens = num_pieces


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    async for line in stream:
        if line.startswith(b"data:"):
            yield line[5:].strip()
