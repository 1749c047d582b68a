"""Threads that compile grammars for asyncio: few, since nothing can stop one before its grammar is done."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from specdec.errors import CapacityError

T = TypeVar("T")

MOST_THREADS = 4


class GrammarThreads:
    """Runs slow work on at most `MOST_THREADS` threads, which hold up neither other work nor the end of the process."""

    def __init__(self) -> None:
        """No thread is started yet."""
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_abandoned = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which waits for a free thread.

        Raises:
            CapacityError: all threads have work whose callers have given up, and which may take for ever.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._num_abandoned >= MOST_THREADS:
                raise CapacityError(
                    f"{MOST_THREADS} grammars of requests that have ended are still being compiled, and there is no "
                    "thread for another one. Come back later, or send a simpler grammar"
                )
            self._work.put((future, work))
            if self._num_threads < MOST_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="specdec-grammar", daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():  # it runs
                self._count_abandoned(1)
                future.add_done_callback(lambda _: self._count_abandoned(-1))
            raise

    def close(self) -> None:
        """Let the threads end when what was asked for is done."""
        with self._lock:
            for _ in range(self._num_threads):
                self._work.put(None)
            self._num_threads = 0

    def _count_abandoned(self, change: int) -> None:
        with self._lock:
            self._num_abandoned += change

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work
