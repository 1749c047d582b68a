"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = _encode(data)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


class Events:
    """Makes the events of one stream, whose data are objects that begin with the same keys.

    Args:
        frame: those keys and their values, at least one; encoded once, since there is an event for each step.
    """

    def __init__(self, frame: dict[str, Any]) -> None:
        self._head = f"data: {_encode(frame)[:-1]},"

    def __call__(self, content: dict[str, Any]) -> bytes:
        """One event: the frame and ``content``, which is not empty."""
        return f"{self._head}{_encode(content)[1:]}\n\n".encode()


class EventStream(Response):
    """Sends what a generator yields, part by part, and closes the generator as soon as the client is gone.

    The transport takes a part only when it has room, so that a slow reader holds back its own generator: nothing
    piles up here. The engine goes on, and what it makes meanwhile is one part for this reader.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})}, media_type=self.media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator ends or the client goes."""
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, watching):
                task.cancel()
            results = await asyncio.gather(sending, watching, return_exceptions=True)
            await self._close()  # a generator that never began does not close what it was to read from
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _send(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes first.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
