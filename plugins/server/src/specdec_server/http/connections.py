"""Connections whose headers do not come are closed."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)


def timed_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, with a limit on the time until the headers of a request are there.

    Args:
        seconds: from the connection, and from the first byte of a later request; 0 for no limit.
    """

    class TimedProtocol(HttpToolsProtocol):
        header_timer: asyncio.TimerHandle | None = None
        has_begun = False
        """Whether a part of the headers has come."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.has_begun = True
                self._start_timer()
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._stop_timer()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            if seconds and self.header_timer is None:
                self.header_timer = self.loop.call_later(seconds, self._give_up)

        def _stop_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None
            self.has_begun = False

        def _give_up(self) -> None:
            if self.has_begun:
                host = self.client[0] if self.client else "?"
                logger.warning("%s did not send its headers within %g s (server.header_timeout)", host, seconds)
            self.transport.close()

    return TimedProtocol
