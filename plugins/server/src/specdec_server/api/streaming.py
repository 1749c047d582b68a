"""From the engine's outputs to a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from specdec_server.http.errors import as_api_error
from specdec_server.http.streams import DONE, EventStream, event, while_connected

if TYPE_CHECKING:
    from starlette.requests import Request

    from specdec_server.api.service import Service

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def respond(
    service: Service,
    request: Request,
    outputs: AsyncGenerator[T],
    chunks: Callable[[AsyncGenerator[T]], AsyncGenerator[bytes]],
    *,
    done: bytes = DONE,
    on_error: Callable[[dict[str, Any]], bytes] = event,
) -> EventStream:
    """A stream of events, once there is a first output: what is refused until then gets a proper status.

    Args:
        service: the served model.
        request: the client's request.
        outputs: what the engine gives.
        chunks: makes events of it.
        done: the last event.
        on_error: makes an event of an error's body, when it is too late for a status.
    """

    async def first_output() -> T:
        return await anext(outputs)

    try:
        first = await while_connected(request, first_output())
    except BaseException:
        await outputs.aclose()
        raise

    async def all_outputs() -> AsyncGenerator[T]:
        yield first
        async for output in outputs:
            yield output

    async def parts() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(chunks(all_outputs())) as made:
                async for part in made:
                    yield part
        except Exception as error:
            known = as_api_error(error, service.config.retry_after)
            if known.status == 500:
                logger.error("a stream failed: %s", error, exc_info=error)
            yield on_error(known.body())
            return
        yield done

    return EventStream(parts(), outputs.aclose, headers=service.headers)
