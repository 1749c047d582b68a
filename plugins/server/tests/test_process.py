"""`specdec serve` as a process: settings, signals, and what the README shows."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from specdec.errors import ConfigError
from specdec_server.config import ServerConfig
from specdec_server.serve import Server, announce, listen, open_port

from .test_disconnects import request_bytes

README = Path(__file__).parents[1] / "README.md"
OPTIONS = ["--dtype", "float32", "--kv-cache-memory", "16MiB", "--max-model-len", "2000", "--num-threads", "1"]
SETTINGS = """\
model = "{model}"
[speculative]
method = "ngram"
num_speculative_tokens = 3
[server]
port = 0
served_model_name = ["tiny", "demo:smollm2"]
shutdown_timeout = 20
"""


class Process:
    """A server process; `url` is what it printed."""

    def __init__(self, *arguments: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "specdec.cli.main", "serve", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self._asked = False
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serves .* at (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        for _ in range(600):
            try:
                if httpx.get(self.url + "/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("never ready")

    def terminate(self, signal_: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, once: a second time would end it at once."""
        if not self._asked and self.process.poll() is None:
            self.process.send_signal(signal_)
        self._asked = True

    def stop(self) -> int:
        self.terminate()
        code = self.process.wait(40)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "specdec.toml"
    file.write_text(SETTINGS.format(model=model), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def process(settings: Path) -> Iterator[Process]:
    server = Process("--config", str(settings), *OPTIONS)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_the_readme_works_with_curl_and_the_openai_client(process, tmp_path):
    """Every block is run as it is written, but for the address."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", text, re.S)
    run = [(kind, code) for kind, code in blocks if "localhost:8000" in code]
    assert {kind for kind, _ in run} == {"bash", "python"}
    for kind, code in run:
        code = code.replace("http://localhost:8000", process.url)
        command = (
            ["bash", "-euo", "pipefail", "-c", code] if kind == "bash" else [sys.executable, "-W", "error", "-c", code]
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        assert '"error":' not in done.stdout
        assert done.stdout.strip()


def test_bench_serve_measures_it(process, tmp_path, capsys):
    from specdec.cli.main import main

    file = tmp_path / "load.json"
    arguments = ["--base-url", process.url, "--num-prompts", "6", "--max-concurrency", "3", "--max-tokens", "8"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick brown fox"}\n{"prompt": "a draft model"}\n', encoding="utf-8")
    extra = '{"return_spec_stats": true}'
    more = [
        "--prompts",
        str(prompts),
        "--ignore-eos",
        "--output-json",
        str(file),
        "--extra-body",
        extra,
        "--save-detailed",
    ]
    assert main(["bench", "serve", *arguments, *more]) == 0
    assert "time to first token" in capsys.readouterr().out
    numbers = json.loads(file.read_text(encoding="utf-8"))
    assert (numbers["completed"], numbers["failed"], numbers["total_output_tokens"]) == (6, 0, 48)
    assert numbers["max_concurrent_requests"] <= 3
    assert len(numbers["requests"]) == 6
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < numbers[f"median_{name}_ms"] <= numbers[f"p99_{name}_ms"]
    assert numbers["settings"]["model"] == "tiny"
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "Is the server running?" in capsys.readouterr().err


def test_the_list_of_commands_names_it_as_it_is_typed(capsys):
    from specdec.cli.main import main

    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "    bench serve " in shown
    assert "bench.serve" not in shown
    assert main(["bench", "serve", "--nosuch"]) == 2
    assert capsys.readouterr().err == "error: unknown option '--nosuch'. See: specdec bench serve --help\n"


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_what_runs_and_refuses_what_is_new(settings, signal_):
    server = Process("--config", str(settings), *OPTIONS)
    server.wait_ready()
    body = {"prompt": "the quick", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "speculation": False}
    texts: list[str] = []
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url, timeout=60) as other:
            assert other.get("/ready").status_code == 200
            server.terminate(signal_)
            while other.get("/ready").status_code == 200:
                time.sleep(0.01)
            refused = other.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert other.get("/health").status_code == 200
        texts = [line for line in lines if line]
    assert texts[-1] == "data: [DONE]"
    assert json.loads(texts[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.stop() == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_stops_the_server_unless_it_is_ignored(running, ignored):
    server = Server(running.service)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with server.capture_signals():
            assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else server.handle_exit)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_what_runs_and_tells_it(settings):
    server = Process("--config", str(settings), *OPTIONS)
    server.wait_ready()
    body = {"prompt": "the quick", "max_tokens": 1900, "ignore_eos": True, "speculation": False, "stream": True, "n": 8}
    with ExitStack() as opened:
        client = opened.enter_context(httpx.Client(base_url=server.url, timeout=60))
        streams = []
        for _ in range(3):
            response = opened.enter_context(client.stream("POST", "/v1/completions", json=body))
            streams.append(response.iter_lines())
            next(streams[-1])
        for signals in (1, 2):
            server.process.send_signal(signal.SIGINT)
            while len(server.lines) < 1 + signals:
                time.sleep(0.01)
        lasts = [[line for line in lines if line][-1] for lines in streams]
    assert ['"code":"aborted"' in last for last in lasts] == [True] * 3
    assert server.process.wait(40) == 0
    server.stop()
    assert server.lines[1:] == ["SIGINT: finishing what runs\n", "SIGINT again: ending what runs\n"]


def test_a_body_that_does_not_come_is_answered_when_the_server_stops(settings):
    server = Process("--config", str(settings), *OPTIONS)
    server.wait_ready()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.settimeout(30)
        client.sendall(request_bytes("/v1/completions", {"prompt": "x"})[:-3])
        while httpx.get(server.url + "/metrics", timeout=30).text.find("http_requests_active 2.0") < 0:
            time.sleep(0.01)
        for signals in (1, 2):
            server.process.send_signal(signal.SIGTERM)
            while len(server.lines) < 1 + signals and server.process.poll() is None:
                time.sleep(0.01)
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"stopping"' in answer
    assert server.process.wait(40) == 0
    server.stop()
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def test_an_address_is_one_servers_from_the_start():
    """Both would load a model for minutes; then the second has nothing to listen on."""
    first = listen(ServerConfig(port=0))
    port = first.getsockname()[1]
    config = ServerConfig(port=port)
    taken = f"cannot listen on 127.0.0.1:{port}: address already in use"
    with first:
        with pytest.raises(ConfigError, match=taken):
            listen(config)
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
            pass
        open_port(first, config)
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = first.accept()
            connection.close()  # this side closes first: its end stays in TIME_WAIT
    with listen(config) as again:
        open_port(again, config)
    with socket.socket() as other, socket.socket() as late:
        for one in (other, late):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ConfigError, match=taken):
            open_port(late, config)


def test_an_ipv6_address_is_told_as_a_url(monkeypatch, capsys, running):
    assert socket.has_ipv6
    with listen(ServerConfig(host="::1", port=0)) as listening:
        monkeypatch.setattr(running.service, "config", ServerConfig(host="::1", port=0))
        announce(running.service, listening)
        port = listening.getsockname()[1]
        assert capsys.readouterr().err.endswith(f" at http://[::1]:{port}\n")
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: "):
            listen(ServerConfig(host="::1", port=port))


@pytest.mark.slow
def test_sigterm_under_load_ends_in_time_even_with_a_client_that_does_not_read(settings):
    """What is not finished in time is told so; a client that does not take its answer holds up nothing."""
    server = Process("--config", str(settings), "--shutdown-timeout", "0.5", *OPTIONS)
    server.wait_ready()
    body = {"prompt": "the quick", "max_tokens": 1900, "ignore_eos": True, "speculation": False, "stream": True}
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with ExitStack() as connections:
        clients = []
        for number in range(12):
            client = connections.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048 if number == 0 else 65536)
            client.connect(address)
            client.settimeout(30)
            client.sendall(request_bytes("/v1/completions", {**body, "n": 4, "logprobs": 5, "return_token_ids": True}))
            clients.append(client)
        assert clients[1].recv(100).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        server.terminate()
        ends = [read_to_end(client) for client in clients[1:]]
        assert server.stop() == 0
        assert time.monotonic() - began < 20
    for text in ends:
        assert b"[DONE]" in text or b'"code":"aborted"' in text or b'"message":' in text, text[-300:]
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def read_to_end(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[server]\nprot = 1\n", "unknown setting 'server.prot' (specdec.toml:3). Did you mean 'port'?"),
        ('[server]\nport = "x"\n', "server.port = 'x' (specdec.toml:3): must be an integer from 0 to 65535."),
        ("[sever]\nport = 1\n", "unknown setting 'sever'"),
        ("[server]\nchat_template = 'none.jinja'\n", "server.chat_template = 'none.jinja' cannot be read"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_loaded(tmp_path, monkeypatch, capsys, text, told):
    from specdec.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("specdec.toml").write_text(f'model = "nowhere"\n{text}', encoding="utf-8")
    assert main(["serve"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("api_key = 's3cret'", "server.api_key = '…' (specdec.toml:3): must be a list of names."),
        ("api_key = ['s3cret', 5]", "server.api_key = '…' (specdec.toml:3): must be a list of names."),
        ("api_key = ['s3cret ']", "server.api_key: a key has a character that clients cannot send"),
        ("api_key = ['s3crét']", "server.api_key: a key has a character that clients cannot send"),
        ("ssl_certfile = 'none.pem'", "server.ssl_certfile = 'none.pem' cannot be read: no such file or directory"),
        ("ssl_certfile = 'specdec.toml'", "is no certificate in PEM form whose private key is in the same file"),
    ],
)
def test_keys_and_certificates_are_checked_before_anything_is_loaded_and_not_shown(
    tmp_path, monkeypatch, capsys, text, told
):
    from specdec.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("specdec.toml").write_text(f'model = "nowhere"\n[server]\n{text}\n', encoding="utf-8")
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "s3cr" not in error


@pytest.mark.parametrize("value", ["", ",", " , "])
def test_a_variable_for_keys_without_one_does_not_open_the_server(monkeypatch, tmp_path, capsys, value):
    from specdec.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECDEC_SERVER_API_KEY", value)
    assert main(["serve", "nowhere"]) == 2
    assert "SPECDEC_SERVER_API_KEY is set but holds no key" in capsys.readouterr().err
    if not value:
        assert main(["serve", "nowhere", "--api-key", "x"]) == 2
        assert "nowhere" in capsys.readouterr().err


def test_other_commands_pass_over_the_servers_table(tmp_path, monkeypatch, capsys):
    from specdec.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("specdec.toml").write_text('model = "m"\n[server]\nport = 9000\n', encoding="utf-8")
    assert main(["config"]) == 0
    assert "block_size" in capsys.readouterr().out


def test_a_verifier_for_benchmarks_is_refused_unless_meant(model, serving, monkeypatch):
    from specdec.errors import ConfigError
    from specdec.verify.match import MatchVerifier
    from specdec_server.config import ServerConfig
    from specdec_server.serve import check_verifier

    monkeypatch.setattr(MatchVerifier, "benchmark_only", True)
    monkeypatch.setattr(MatchVerifier, "lossless", False)
    with serving(model) as server, server.client() as client:
        with pytest.raises(ConfigError, match="--allow-benchmark-verifier"):
            check_verifier(server.llm, ServerConfig())
        check_verifier(server.llm, ServerConfig(allow_benchmark_verifier=True))
        response = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2, "return_spec_stats": True})
        assert response.headers["x-specdec-lossless"] == "false"
        assert response.json()["system_fingerprint"].endswith("-lossy-match")
        assert response.json()["spec_stats"]["lossless"] is False
        assert client.get("/v1/models").json()["data"][0]["lossless"] is False
