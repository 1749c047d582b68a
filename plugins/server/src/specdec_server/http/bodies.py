"""Bodies are measured before they are parsed: parsing stops everything else, on any thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from specdec_server.http.errors import APIError
from specdec_server.http.streams import ClientGone

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
LARGE = 64 << 10
"""Bytes of a body from which on what is done with it is worth a thread."""

_OTHERS = bytes(set(range(256)).difference(b'"[{:'))


def num_parts(body: bytes, enough: int) -> int:
    """Lists, objects and keys of a JSON text; at least as many when they are no more than ``enough``.

    Args:
        body: the text; what is not JSON is counted somehow.
        enough: with so many nobody asks for the exact number, which takes longer.
    """
    most = _num_signs(body)
    if most <= enough:
        return most
    # Without escaped quotes, and without two quotes side by side, as many stand before each sign, modulo two.
    signs = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS).replace(b'""', b"")
    return _num_signs(b"".join(signs.split(b'"')[::2]))


def _num_signs(body: bytes) -> int:
    return sum(map(body.count, (b"[", b"{", b":")))


def measured_route(most_parts: int) -> type[APIRoute]:
    """A route that refuses bodies of more parts than ``most_parts``, with status 413, before they are parsed."""

    class MeasuredRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def measured(request: Request) -> Response:
                try:
                    parts = num_parts(await request.body(), most_parts)
                except ClientDisconnect:
                    raise ClientGone from None
                if parts > most_parts:
                    most = f"at most {most_parts} (server.max_body_parts)"
                    raise APIError(413, f"the body has {parts} lists, objects and keys; this server takes {most}")
                return await handle(request)

            return measured

    return MeasuredRoute


async def apart(request: Request, work: Callable[[], T]) -> T:
    """The result of ``work`` on a request's body: on a thread when that is large, so that others go on."""
    return await run_in_threadpool(work) if len(await request.body()) > LARGE else work()
