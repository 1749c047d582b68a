"""``specdec serve``: load the model, listen, and stop in an orderly way."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import uvicorn

from specdec.cli.engines import open_async_llm
from specdec.config.flags import read_config, read_table
from specdec.config.load import variable_name
from specdec.errors import ConfigError
from specdec.wording import reason_of
from specdec_server.api.service import Service
from specdec_server.app import create_app, read_template
from specdec_server.config import ServerConfig
from specdec_server.http.connections import timed_protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from specdec.async_llm import AsyncLLM
    from specdec.config import EngineConfig

logger = logging.getLogger(__name__)

KEY_VARIABLE = variable_name("server.api_key")
_POLL_SECONDS = 0.05
_HURRIED_SECONDS = 1
"""For clients to take their last words, after a second signal."""
_BACKLOG = 2048
"""Connections that may wait to be taken."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    server_config, _ = read_table(arguments, ServerConfig, ServerConfig.SECTION)
    engine_config, _ = read_config(arguments)
    template = read_template(server_config.chat_template)
    check_keys(server_config, os.environ)
    check_certificate(server_config)
    listening = listen(server_config)
    try:
        llm = open_async_llm(with_prometheus(engine_config))
    except BaseException:
        listening.close()
        raise
    try:
        check_verifier(llm, server_config)
        service = Service(llm, server_config, chat_template=template)
        open_port(listening, server_config)
        announce(service, listening)
        Server(service).run(sockets=[listening])
    finally:
        listening.close()
        llm.close()
    return 0


def with_prometheus(config: EngineConfig) -> EngineConfig:
    """The engine's configuration with the stat logger that `/metrics` shows."""
    if "prometheus" in config.stat_loggers:
        return config
    return attrs.evolve(config, stat_loggers=(*config.stat_loggers, "prometheus"))


def check_keys(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Refuse to be open to all where a key was meant to be set.

    Raises:
        ConfigError: the variable for keys is there and there is no key.
    """
    if KEY_VARIABLE in environ and not config.api_key:
        raise ConfigError(
            f"{KEY_VARIABLE} is set but holds no key, so the server would be open to all. Give it a key, or unset it "
            "if that is meant",
            path="server.api_key",
        )


def check_certificate(config: ServerConfig) -> None:
    """Refuse files that HTTPS cannot use.

    Raises:
        ConfigError: one cannot be read, or they are no certificate with its key.
    """
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(config, name)
        try:
            if file is not None:
                Path(file).read_bytes()
        except OSError as error:
            message = f"server.{name} = {file!r} cannot be read: {reason_of(error)}"
            raise ConfigError(message, path=f"server.{name}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (ssl.SSLError, ValueError) as error:
        place = "server.ssl_keyfile" if config.ssl_keyfile else "the same file"
        message = f"{config.ssl_certfile!r} is no certificate in PEM form whose private key is in {place}"
        raise ConfigError(f"server.ssl_certfile = {message}", path="server.ssl_certfile") from error


def check_verifier(llm: AsyncLLM, config: ServerConfig) -> None:
    """Refuse a verifier whose text is wrong on purpose.

    Raises:
        ConfigError: it is one, and nobody said that this is meant.
    """
    if llm.benchmark_only and not config.allow_benchmark_verifier:
        raise ConfigError(
            f"the verifier {llm.config.verifier!r} is for benchmarks: it makes wrong text. Choose another one, or set "
            "server.allow_benchmark_verifier (--allow-benchmark-verifier) when nobody reads the text",
            path="verifier",
        )


def listen(config: ServerConfig) -> socket.socket:
    """A socket that holds the address, before the model is loaded, so that a port in use costs nothing.

    It refuses connections until `open_port`. SO_REUSEADDR passes over old connections of an earlier server, but lets
    two sockets have one address as long as neither listens: it is on only while it is needed.

    Raises:
        ConfigError: the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listening.close()
        raise _cannot_listen(config, error) from error
    return listening


def open_port(listening: socket.socket, config: ServerConfig) -> None:
    """Take connections from now on.

    Raises:
        ConfigError: another program has come to listen there first.
    """
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    place, reason = _place(config.host, config.port), reason_of(error)
    message = f"cannot listen on {place}: {reason}. Choose another server.port or server.host"
    return ConfigError(message, path="server.port")


def _place(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announce(service: Service, listening: socket.socket) -> None:
    """One line that says where the server is and what it serves."""
    config = service.config
    scheme = "https" if config.ssl_certfile else "http"
    port = listening.getsockname()[1]
    place = _place(config.host, port)
    print(f"specdec serves {service.names[0]} at {scheme}://{place}", file=sys.stderr, flush=True)
    if not service.llm.lossless:
        logger.warning("the verifier %r is lossy: answers differ from the model's own", service.llm.config.verifier)
    if not config.api_key and os.environ.get("VLLM_API_KEY"):
        logger.warning("VLLM_API_KEY is not read here, and no API key is set: set SPECDEC_SERVER_API_KEY")
    if not config.api_key and config.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("no API keys are set, and %s can be reached from other machines", config.host)


class Server(uvicorn.Server):
    """uvicorn, stopping in two steps: first nothing new begins while what runs finishes, then the port is closed."""

    def __init__(self, service: Service) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=timed_protocol(config.header_timeout),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=30,
                backlog=_BACKLOG,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._hurried = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped."""
        self._loop = asyncio.get_running_loop()
        gc.freeze()  # the model and the libraries stay: looking through them holds up every stream for long
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Those of uvicorn, and SIGHUP, that of a closed terminal, unless it is ignored as under nohup."""
        hangup = getattr(signal, "SIGHUP", None)
        with super().capture_signals():
            if hangup is None or threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.getsignal(hangup)
            if before is not signal.SIG_IGN:
                signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends what runs, a third one does not even wait for that."""
        del frame
        if self._hurried or self._loop is None:
            self.should_exit = self.force_exit = True
        elif self._service.draining:
            logger.warning("%s again: ending what runs", signal.Signals(sig).name)
            self._hurried = True
            self.config.timeout_graceful_shutdown = _HURRIED_SECONDS
        else:
            logger.warning("%s: finishing what runs", signal.Signals(sig).name)
            self._service.draining = True
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the requests that run, as long as the configuration says and nobody hurries."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._service.config.shutdown_timeout
        while self._service.num_active and loop.time() < deadline and not self._hurried:
            await asyncio.sleep(_POLL_SECONDS)
        await self._service.abort_all()
        self.should_exit = True
