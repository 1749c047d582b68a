"""Sends many requests at chosen moments."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from attrs import frozen

from specdec.errors import SpecdecError
from specdec.wording import reason_of
from specdec_server.bench.client import Result, message_of, send


class LoadError(SpecdecError):
    """The server to measure cannot be used."""


@frozen(kw_only=True)
class Load:
    """What is sent, and when."""

    url: str
    """Where requests go."""
    headers: dict[str, str]
    request_rate: float
    """Requests a second; infinite for all at once."""
    burstiness: float
    """Shape of the gamma distribution of the gaps; 1 is a Poisson process."""
    max_concurrency: int | None
    timeout: float
    seed: int


async def run_load(
    load: Load, bodies: Sequence[dict[str, Any]], on_end: Callable[[Result], None]
) -> tuple[list[Result], float]:
    """Send everything, or until this is cancelled.

    Returns:
        The results of what has ended, in the order of the bodies, and the wall seconds from first to last.
    """
    limit = asyncio.Semaphore(load.max_concurrency or len(bodies))
    gaps = arrival_gaps(load, len(bodies))
    async with session(load) as connection:

        async def one(body: dict[str, Any]) -> Result:
            async with limit:
                result = await send(connection, load.url, body)
            on_end(result)
            return result

        began = due = time.perf_counter()
        tasks: list[asyncio.Task[Result]] = []
        try:
            for body, gap in zip(bodies, gaps, strict=True):
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(one(body)))
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ended = [task.result() for task in tasks if not task.cancelled()]
        return ended, time.perf_counter() - began


def session(load: Load) -> aiohttp.ClientSession:
    """Connections without a limit of their own."""
    return aiohttp.ClientSession(
        headers=load.headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout),
        read_bufsize=1 << 20,
    )


def arrival_gaps(load: Load, count: int) -> list[float]:
    """Seconds before each request."""
    if math.isinf(load.request_rate):
        return [0.0] * count
    rng = random.Random(load.seed)
    scale = 1.0 / (load.request_rate * load.burstiness)
    return [0.0, *(rng.gammavariate(load.burstiness, scale) for _ in range(count - 1))]


async def first_model(base_url: str, headers: dict[str, str]) -> str:
    """The name of the first model that the server lists.

    Raises:
        LoadError: it lists none.
    """
    url = f"{base_url}/v1/models"
    async with AsyncExitStack() as stack:
        try:
            timeout = aiohttp.ClientTimeout(total=30)
            connection = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            response = await stack.enter_async_context(connection.get(url))
            content = await response.text()
            if response.status != 200:
                hint = ". Give --api-key, or set SPECDEC_API_KEY" if response.status == 401 else ""
                raise LoadError(f"{url} answers HTTP {response.status}: {message_of(content)}{hint}")
            return str((await response.json())["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise LoadError(f"{url} gives no list of models: {reason_of(error)}. Is the server running?") from error
