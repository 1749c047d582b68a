"""What happens around every request: its size is limited, its key checked, its answer counted. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from specdec_server.http.errors import APIError, as_api_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from specdec_server.metrics.http import HTTPMetrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/", "/page"})
"""Need no key: what load balancers, Prometheus and browsers ask for."""


class Gate:
    """Outermost layer: counts, limits bodies, checks keys, and turns what nobody caught into a 500."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str],
        max_body_size: int,
        retry_after: int,
        timeout: float,
        metrics: HTTPMetrics,
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode("utf-8")) for key in api_keys]
        self._max_body_size = max_body_size
        self._retry_after = retry_after
        self._timeout = timeout or None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        began = time.perf_counter()
        self._metrics.begin()

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._serve(scope, receive, counting_send)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await as_api_error(error, self._retry_after).response()(scope, receive, counting_send)
        except asyncio.CancelledError:  # by the end of the server alone, which has waited for this request
            logger.warning("%s %s was not finished when the server stopped", scope["method"], scope["path"])
            if not status:
                await APIError(503, "the server has stopped", code="stopping").response()(scope, receive, counting_send)
        finally:
            self._metrics.count(scope, status, time.perf_counter() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> APIError | None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_size:
            return self._too_large()
        coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if coding.lower() != "identity":
            return APIError(415, f"a body with Content-Encoding {coding!r} is not understood; send it uncompressed")
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith("/page/") or scope["method"] == "OPTIONS"
        if not self._keys or is_open or self._has_key(headers):
            return None
        return APIError(
            401,
            "no valid API key: send one as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, in the same time
        return scheme.lower() == b"bearer" and any(matches)

    def _limited(self, receive: Receive) -> Receive:
        """The body's parts, as long as they stay within the limits together."""
        size = 0
        complete = False
        deadline = None if self._timeout is None else asyncio.get_running_loop().time() + self._timeout

        async def limited() -> Message:
            nonlocal size, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not come within {self._timeout:g} s (server.request_timeout)"
                raise HTTPException(408, detail, headers={"Connection": "close"}) from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._max_body_size:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than {self._max_body_size} bytes (server.max_body_size)")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
