"""What the benchmarks share: prompts, subprocesses, result files."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = HERE / "peers"
RESULTS = HERE / "results"


class PeerError(Exception):
    """An engine under test failed."""


def _leave(_number: int, _frame: object) -> None:
    """End in an orderly way, so that no stopped engine stays behind."""
    sys.exit(128 + signal.SIGTERM)


class PausedProcess:
    """A process, with its children, that runs only while it is measured, and never outlives the benchmark.

    It is stopped (SIGSTOP) meanwhile: engines wait for work by spinning, which would slow the others.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None, **pipes: Any) -> None:
        """Start it; it runs until it is paused."""
        environ = {**os.environ, **(environ or {})}
        self.process = subprocess.Popen(command, env=environ, start_new_session=True, text=True, **pipes)
        atexit.register(self._signal, signal.SIGKILL)
        signal.signal(signal.SIGTERM, _leave)

    def pause(self) -> None:
        """Stop it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ask it to end, after a minute kill it."""
        self.resume()
        if self.process.stdin is not None:
            self.process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        atexit.unregister(self._signal)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, number)


class PeerProcess(PausedProcess):
    """An engine in a process of its own; see `peers/protocol.py`."""

    def __init__(self, name: str, script: str, python: str, environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__([python, str(PEERS / script)], environ, encoding="utf-8", **pipes)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            PeerError: the engine failed or its process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.resume()
        try:
            self.process.stdin.write(json.dumps({"op": op, **request}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer below says it
        line = self.process.stdout.readline()
        self.pause()
        if not line:
            self.resume()
            raise PeerError(f"{self.name}: the process ended with code {self.process.wait()} during {op!r}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer


def read_conversations(name: str, count: int, *, spread: bool = False) -> list[list[dict[str, str]]]:
    """The first turns of a prompt set as conversations.

    Args:
        name: a set in `prompts/`, or a .jsonl file.
        count: how many.
        spread: take them evenly from the whole set, rather than from its beginning.
    """
    path = Path(name) if name.endswith(".jsonl") else HERE / "prompts" / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    if spread:
        lines = [lines[index * len(lines) // count] for index in range(count)]
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines[:count]]


def _without_places(value: Any) -> Any:
    """The same with only the name of each absolute path: where things lay says nothing to the next reader."""
    if isinstance(value, dict):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(inner) for inner in value]
    if isinstance(value, Path) or (isinstance(value, str) and "\n" not in value and Path(value).is_absolute()):
        return Path(value).name
    return value


def write_result(name: str, result: dict[str, Any], out: str | None) -> Path:
    """Write a result with the machine and the time; into `results/` unless told where."""
    from specdec.cli.machine import describe_machine

    path = Path(out) if out else RESULTS / f"{name}.json"
    whole = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "machine": describe_machine(),
        **result,
    }
    whole = _without_places(whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return path


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--model", default="demo:smollm2", help="target model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="result file; benchmarks/results/NAME.json when not given")
