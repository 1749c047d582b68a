"""Grammars are compiled on few threads, whatever becomes of those that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from specdec.errors import CapacityError
from specdec.grammar.threads import MOST_THREADS, GrammarThreads


class Slow:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self) -> str:
        self.threads.append(threading.current_thread())
        assert self.release.wait(60)
        return "done"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_work_waits_for_a_free_thread() -> None:
    async def run() -> None:
        threads, slow = GrammarThreads(), Slow()
        tasks = [asyncio.create_task(threads.run(slow)) for _ in range(3 * MOST_THREADS)]
        await until(lambda: len(slow.threads) == MOST_THREADS)
        slow.release.set()
        assert await asyncio.gather(*tasks) == ["done"] * 3 * MOST_THREADS
        assert len(set(slow.threads)) == MOST_THREADS
        assert all(thread.daemon for thread in slow.threads), "the end of the process waits for others"

    asyncio.run(run())


def test_errors_reach_the_caller_and_leave_the_thread() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def run() -> None:
        threads = GrammarThreads()
        for _ in range(3 * MOST_THREADS):
            with pytest.raises(KeyError):
                await threads.run(fail)

    asyncio.run(run())


def test_threads_whose_callers_have_gone_are_not_waited_for() -> None:
    async def run() -> None:
        threads, slow, never = GrammarThreads(), Slow(), Slow()
        tasks = [asyncio.create_task(threads.run(slow)) for _ in range(MOST_THREADS)]
        await until(lambda: len(slow.threads) == MOST_THREADS)
        waiting = asyncio.create_task(threads.run(never))
        await asyncio.sleep(0)
        for task in (*tasks, waiting):
            task.cancel()
        await asyncio.gather(*tasks, waiting, return_exceptions=True)
        with pytest.raises(CapacityError, match="4 grammars of requests that have ended are still being compiled"):
            await threads.run(lambda: "x")
        slow.release.set()
        await until(lambda: threads._num_abandoned == 0)
        assert await threads.run(lambda: "x") == "x"
        assert never.threads == [], "what was given up before it began is not done"

    asyncio.run(run())


def test_threads_end_when_they_are_closed() -> None:
    async def run() -> list[threading.Thread]:
        threads, slow = GrammarThreads(), Slow()
        tasks = [asyncio.create_task(threads.run(slow)) for _ in range(MOST_THREADS + 1)]
        await until(lambda: len(slow.threads) == MOST_THREADS)
        threads.close()
        slow.release.set()
        assert await asyncio.gather(*tasks) == ["done"] * (MOST_THREADS + 1)
        return slow.threads

    for thread in asyncio.run(run()):
        thread.join(60)
        assert not thread.is_alive()
