"""Errors as OpenAI's API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from specdec.errors import CapacityError, EngineDeadError, InvalidRequestError, RequestFailedError, SpecdecError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class AsciiJSONResponse(JSONResponse):
    """JSON that holds any string, also one with half a character (a lone surrogate)."""

    def render(self, content: Any) -> bytes:
        """Compact and ASCII only."""
        return json.dumps(content, separators=(",", ":")).encode("ascii")


class APIError(Exception):
    """Ends a request with a status and a message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as clients see it."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> AsciiJSONResponse:
        """The error as an HTTP response."""
        return AsciiJSONResponse(self.body(), status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """The client's mistake."""
    return APIError(400, message, param=param, code=code)


def as_api_error(error: Exception, retry_after: int) -> APIError:
    """What a client is told about an exception of the engine.

    Args:
        error: the exception.
        retry_after: seconds a refused client should wait.
    """
    wait = {"Retry-After": str(retry_after)}
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequestError):
        return invalid(str(error), error.option)
    if isinstance(error, CapacityError):
        return APIError(429, str(error), code="queue_full", headers=wait)
    if isinstance(error, EngineDeadError):
        return APIError(503, str(error), code="engine_dead")
    if isinstance(error, RequestFailedError):
        return APIError(500, str(error), code="generation_failed")
    if isinstance(error, SpecdecError):
        return invalid(str(error))
    return APIError(500, "the server failed on this request; its log says why", code="internal_error")
