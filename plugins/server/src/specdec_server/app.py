"""The ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from specdec.config.problems import closest
from specdec.errors import SpecdecError
from specdec_server import __version__
from specdec_server.api import requests, status, tokens
from specdec_server.api.chat import create_chat_completion
from specdec_server.api.completions import create_completion
from specdec_server.api.responses import create_response
from specdec_server.api.service import Service
from specdec_server.api.unsupported import ADVICE
from specdec_server.http.bodies import measured_route
from specdec_server.http.errors import APIError, AsciiJSONResponse, as_api_error
from specdec_server.http.middleware import Gate
from specdec_server.http.streams import ClientGone

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Endpoint = Callable[..., Awaitable[Response]]

CLIENT_GONE = 499
"""Status in metrics and logs of a request whose client went away; nobody receives it."""


def create_app(service: Service) -> ASGIApp:
    """The application for a service, with everything around it."""
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None)
    _add_model_routes(app, service)
    _add_status_routes(app, service)
    if service.config.page:
        from specdec_server.page.routes import add_page

        add_page(app)
    _add_error_handlers(app, service)
    outer: ASGIApp = Gate(
        app,
        api_keys=service.config.api_key,
        max_body_size=service.max_body_size,
        retry_after=service.config.retry_after,
        timeout=service.config.request_timeout,
        metrics=service.metrics,
    )
    if service.config.allowed_origins:
        outer = CORSMiddleware(
            outer,
            allow_origins=list(service.config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in browsers send some of their own
        )
    return outer


def _add_model_routes(app: FastAPI, service: Service) -> None:
    route = measured_route(service.config.max_body_parts)

    def post(path: str) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            app.router.add_api_route(
                path, endpoint, methods=["POST"], response_class=AsciiJSONResponse, route_class_override=route
            )
            return endpoint

        return add

    @post("/v1/completions")
    async def completions(body: requests.CompletionRequest, request: Request) -> Response:
        return await create_completion(service, request, body)

    @post("/v1/chat/completions")
    async def chat_completions(body: requests.ChatCompletionRequest, request: Request) -> Response:
        return await create_chat_completion(service, request, body)

    @post("/v1/responses")
    async def responses(body: requests.ResponsesRequest, request: Request) -> Response:
        return await create_response(service, request, body)

    @post("/tokenize")
    async def tokenize(body: requests.TokenizeRequest) -> Response:
        return AsciiJSONResponse(await tokens.tokenize(service, body))

    @post("/detokenize")
    async def detokenize(body: requests.DetokenizeRequest) -> Response:
        return AsciiJSONResponse(await tokens.detokenize(service, body))


def _add_status_routes(app: FastAPI, service: Service) -> None:
    metrics_page = status.MetricsPage(service)

    def get(path: str) -> Callable[[Endpoint], Endpoint]:
        """Serve a path to GET and, as HTTP asks, to HEAD, which some load balancers send."""

        def add(endpoint: Endpoint) -> Endpoint:
            app.add_api_route(path, endpoint, methods=["GET"], response_class=AsciiJSONResponse)
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
            return endpoint

        return add

    @get("/v1/models")
    async def models() -> Response:
        return AsciiJSONResponse(status.models(service))

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return AsciiJSONResponse(status.model(service, service.check_model(name)))

    @get("/health")
    async def health() -> Response:
        return status.health(service)

    @get("/ready")
    async def ready() -> Response:
        return status.ready(service)

    @get("/version")
    async def version() -> Response:
        return AsciiJSONResponse(status.version())

    @get("/metrics")
    async def metrics(request: Request) -> Response:
        return metrics_page(request.headers.get("accept", ""))


# --- errors -------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    Handler = Callable[[Request, Any], Awaitable[Response]]

    async def known(_: Request, error: Exception) -> Response:
        return as_api_error(error, service.config.retry_after).response()

    async def refused(_: Request, error: RequestValidationError) -> Response:
        return body_error(error).response()

    paths = sorted(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))

    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return APIError(error.status_code, _http_message(request, error, paths), headers=headers).response()

    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    handlers: dict[type[Exception], Handler] = {
        APIError: known,
        SpecdecError: known,
        RequestValidationError: refused,
        HTTPException: http,
        ClientGone: gone,
        Exception: known,  # a fault of ours: the gate logs it
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _http_message(request: Request, error: HTTPException, paths: list[str]) -> str:
    """What is wrong with a request as a whole.

    Args:
        request: the request.
        error: what the framework says.
        paths: those that are served.
    """
    path, cause = request.url.path, error.__cause__
    if error.status_code == 404:
        near = closest(path, paths)
        return f"{path!r} is not served here.{f' Did you mean {near!r}?' if near else ''}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{request.method} is not possible for {path!r}; send {allowed}"
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not UTF-8: {cause.reason} at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    if isinstance(cause, ValueError):  # Python's limit on turning text into integers
        return "the body has a number with too many digits"
    return error.detail if isinstance(error.detail, str) else "the request failed"


def body_error(error: RequestValidationError) -> APIError:
    """The first thing that is wrong with a body, as one sentence with the field's name."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"] if part != "body"]
    # Where several types are allowed, pydantic puts the one it tried behind the field's name.
    param = path[0] if path else None
    if problem["type"] == "extra_forbidden":
        advice = ADVICE.get(path[0]) if len(path) == 1 else None
        said = f"there is no field {path[0]!r}. {advice}" if advice else _unknown(path)
        return APIError(400, said, param=param, code="unknown_field")
    if problem["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if problem["type"] == "missing":
        what = f"the field {'.'.join(path)!r} is missing" if path else "the body is missing"
        return APIError(400, what, param=param, code="missing_field")
    if not path:
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return APIError(400, f"{'.'.join(path)}: {problem['msg']}", param=param)


def _unknown(path: list[str]) -> str:
    fields = {
        name
        for model in (requests.CompletionRequest, requests.ChatCompletionRequest, requests.ResponsesRequest)
        for name in model.model_fields
    }
    near = closest(path[-1], sorted(fields)) if len(path) == 1 and path[0] not in fields else None
    hint = f" Did you mean {near!r}?" if near else ""
    return f"unknown field {'.'.join(path)!r}.{hint}"


def read_template(path: str | None) -> str | None:
    """The chat template in a file.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return None
    from specdec.errors import ConfigError
    from specdec.wording import reason_of

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"server.chat_template = {path!r} cannot be read: {reason_of(error)}", path="server.chat_template"
        ) from error
