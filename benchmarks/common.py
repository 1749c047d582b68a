"""What the benchmarks share: prompts, subprocesses, result files."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
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


class PeerProcess:
    """An engine in a process of its own; see `peers/protocol.py`.

    It is stopped (SIGSTOP) except while it answers: engines wait for work by spinning, which would slow the others.
    """

    def __init__(self, name: str, script: str, python: str, environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(PEERS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            encoding="utf-8",
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
        atexit.register(self._signal, signal.SIGKILL)
        signal.signal(signal.SIGTERM, _leave)

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            PeerError: the engine failed or its process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"op": op, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer below says it
        line = self._process.stdout.readline()
        self._signal(signal.SIGSTOP)
        if not line:
            self._signal(signal.SIGCONT)
            raise PeerError(f"{self.name}: the process ended with code {self._process.wait()} during {op!r}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        atexit.unregister(self._signal)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


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
