"""`specdec bench serve` when something goes wrong on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdec.cli.main import main
from specdec_server.bench import load as loading
from specdec_server.bench.client import Result
from specdec_server.bench.load import Load, run_load

LOAD = Load(url="", headers={}, request_rate=1000.0, burstiness=1.0, max_concurrency=None, timeout=60, seed=0)


class CutShort(BaseHTTPRequestHandler):
    """Lists a model; a stream ends in order, as from a proxy whose server died, but without its last event."""

    def do_GET(self) -> None:
        self._give("application/json", b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._give("text/event-stream", b'data: {"choices": [{"text": "so far"}]}\n\n')

    def _give(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def cut_short() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), CutShort) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def bench(url: str, *more: str) -> int:
    return main(["bench", "serve", "--base-url", url, "--num-prompts", "2", "--num-warmups", "0", *more])


def test_an_error_is_told_in_its_own_words_and_nothing_is_not_zero(running, capsys):
    assert bench(running.url, "--max-tokens", "4", "--extra-body", '{"temprature": 1}') == 1
    shown = capsys.readouterr().out
    assert "failed: HTTP 400: unknown field 'temprature'. Did you mean 'temperature'?\n" in shown
    assert "0 completed, 2 failed" in shown
    assert "0.00 " not in shown.partition("ms ")[2]


def test_a_stream_without_its_end_has_failed(cut_short, capsys):
    assert bench(cut_short, "--endpoint", "completions") == 1
    assert "failed: the stream ended before it was complete" in capsys.readouterr().out


def test_a_missing_key_is_told_with_what_to_do(model, serving, capsys):
    with serving(model, {"api_key": ("secret",)}) as server:
        assert bench(server.url) == 2
        error = capsys.readouterr().err
        assert "answers HTTP 401: no valid API key" in error
        assert "Give --api-key, or set SPECDEC_API_KEY" in error


def test_what_has_ended_is_kept_when_the_rest_is_cancelled(monkeypatch):
    async def send(_: object, __: str, body: dict[str, int]) -> Result:
        await asyncio.sleep(0 if body["n"] < 3 else 3600)
        return Result(text=str(body["n"]))

    monkeypatch.setattr(loading, "send", send)

    async def interrupted() -> list[Result]:
        ended = asyncio.Event()
        count = 0

        def on_end(_: Result) -> None:
            nonlocal count
            count += 1
            if count == 3:
                ended.set()

        task = asyncio.create_task(run_load(LOAD, [{"n": n} for n in range(6)], on_end))
        await ended.wait()
        task.cancel()
        return (await task)[0]

    assert [result.text for result in asyncio.run(interrupted())] == ["0", "1", "2"]


def test_ctrl_c_shows_what_was_measured(running, monkeypatch, capsys):
    async def interrupted(*_: object) -> tuple[list[Result], float]:
        return [Result(started=0.0, ended=1.0, arrivals=[0.5, 1.0], num_output_tokens=2)], 1.0

    monkeypatch.setattr("specdec_server.bench.command.run_load", interrupted)
    assert bench(running.url) == 130
    shown = capsys.readouterr()
    assert "1 completed, 0 failed" in shown.out
    assert shown.err == "stopped after 1 of 2 requests\n"


def test_the_address_may_be_the_one_of_openai_clients(running, capsys):
    assert (
        bench(running.url + "/v1/", "--max-tokens", "2", "--endpoint", "completions") == 1
    )  # prompts are too long here
    assert "HTTP 400: the prompt has" in capsys.readouterr().out
    assert bench("localhost:8000") == 2
    assert "--base-url 'localhost:8000': must begin with http:// or https://" in capsys.readouterr().err
