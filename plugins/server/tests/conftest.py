"""A real server over a tiny model, on a thread, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import torch

from specdec import AsyncLLM
from specdec.testing.models import tiny_model
from specdec_server.api.service import Service
from specdec_server.config import ServerConfig
from specdec_server.serve import Server, listen

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory": "8MiB",
    "max_num_seqs": 8,
    "stat_loggers": ("prometheus",),
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "speculation": "always"}


@attrs.define
class Running:
    """A server that answers at ``url``."""

    url: str
    service: Service
    server: Server

    @property
    def llm(self) -> AsyncLLM:
        return self.service.llm

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **settings)

    def free_blocks(self) -> int:
        return self.llm.stats().free_blocks

    def wait_until_idle(self, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.llm.stats()
            if stats.num_running == stats.num_waiting == 0 and self.service.num_active == 0:
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy after {seconds} s: {self.llm.stats()}")


@contextmanager
def _serving(model: Path, server: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """Start a server and stop it at the end."""
    torch.set_num_threads(1)
    config = ServerConfig(**{"port": 0, "served_model_name": ("tiny",), **(server or {})})
    llm = AsyncLLM(str(model), **{**SETTINGS, **settings})
    listening = listen(config)
    uvicorn_server = Server(Service(llm, config))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve([listening])))
    thread.start()
    try:
        while not uvicorn_server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", uvicorn_server._service, uvicorn_server)
    finally:
        uvicorn_server.should_exit = True
        thread.join(20)
        listening.close()
        llm.close()
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def serving() -> Any:
    """``with serving(model, {server settings}, **engine settings) as running``."""
    return _serving


@pytest.fixture(scope="session")
def running(model: Path) -> Iterator[Running]:
    with _serving(model, speculative_config=NGRAM) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
    running.wait_until_idle()
