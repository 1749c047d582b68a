"""Keeps a server busy for a long time, with every kind of request and with proposers that fail.

    python benchmarks/soak.py --minutes 30

A tiny model is served with a proposer that raises, then with one that is slow, then with one that tells every lie of
`specdec.testing.oracles.LIES`, and so on in turns. Clients send streamed and whole requests, long and short, seeds,
several choices, log-probabilities, JSON by a grammar where a backend is installed, and many leave in the middle.

Checked all the time: answers are right (greedy ones and those with a seed equal what a plain engine gave for the same
request, in float32), the server answers, no status is 5xx. After each turn: all KV blocks are free, nothing waits. At
the end: memory has not grown since the first round by more than a limit. Prints a line for each turn, writes
results/soak.json, and ends with code 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from common import RESULTS

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.drafting import Proposer
from specdec.testing.models import tiny_model
from specdec.testing.oracles import LIES, GappyProposer, LyingProposer, RaisingProposer, SlowProposer, WrongProposer
from specdec_server.api.service import Service
from specdec_server.config import ServerConfig
from specdec_server.serve import Server, listen

TEXT = "the quick brown fox jumps over lazy dog draft model proposes tokens target verifies forest river"
WORDS = TEXT.split()
ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory": "24MiB", "max_num_seqs": 16, "seed": 0}
NUM_REFERENCES = 48
NUM_CLIENTS = 12


class TurnsOfLies(Proposer):
    """Each call tells the next lie."""

    def __init__(self, vocab_size: int) -> None:
        # Lies about trees and probabilities need capabilities of their own; a chain proposer cannot tell them.
        names = [name for name in sorted(LIES) if not name.startswith(("parents", "probs"))]
        self._liars = [LyingProposer(name, vocab_size=vocab_size) for name in names]
        self._calls = 0

    def propose(self, batch: Any) -> Any:
        self._calls += 1
        if self._calls % 3:  # in between a draft that is well-formed and wrong
            return WrongProposer(7).propose(batch)
        return self._liars[self._calls // 3 % len(self._liars)].propose(batch)


def proposers() -> dict[str, Proposer]:
    good = WrongProposer(5)
    return {
        "raising": RaisingProposer(GappyProposer(good), every=3),
        "slow": SlowProposer(good, 0.02),
        "lying": TurnsOfLies(512),
    }


def references(model: Path) -> list[dict[str, Any]]:
    """Requests whose answers are known, from an engine without speculation."""
    rng = random.Random(1)
    bodies = []
    for number in range(NUM_REFERENCES):
        words = rng.choices(WORDS, k=rng.choice([3, 10, 60, 200]))
        body: dict[str, Any] = {
            "prompt": " ".join(words),
            "max_tokens": rng.choice([1, 8, 40, 200]),
            "temperature": 0 if number % 2 else 1.0,
        }
        if body["temperature"]:
            body |= {"seed": number, "top_p": 0.95, "n": rng.choice([1, 2])}
        bodies.append(body)
    with LLM(str(model), **ENGINE) as llm:
        for body in bodies:
            options = {key: value for key, value in body.items() if key != "prompt"}
            output = llm.generate([body["prompt"]], SamplingParams(**options), use_tqdm=False)[0]
            body["expected"] = [choice.text for choice in output.outputs]
    return bodies


@contextmanager
def serving(model: Path, proposer: Proposer) -> Iterator[tuple[str, AsyncLLM]]:
    config = ServerConfig(port=0, served_model_name=("tiny",), request_timeout=120)
    llm = AsyncLLM(
        str(model),
        **ENGINE,
        proposer=proposer,
        speculative_config={"num_speculative_tokens": 4, "speculation": "always"},
        max_proposer_faults=10**6,
        stat_loggers=("prometheus",),
    )
    listening = listen(config)
    service = Service(llm, config)
    server = Server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", llm
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        llm.close()
        # FastAPI keeps the endpoints of applications that are gone in a cache, and they know their service.
        del service.llm


class Soak:
    """The clients of one turn."""

    def __init__(self, url: str, known: list[dict[str, Any]], until: float, seed: int) -> None:
        self.url = url
        self.known = known
        self.until = until
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.grammar = True

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=180)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._client(session) for _ in range(NUM_CLIENTS)), self._watch(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        kinds = [self._whole, self._streamed, self._streamed, self._gone, self._gone, self._json, self._odd]
        while time.monotonic() < self.until:
            kind = self.rng.choice(kinds)
            try:
                await kind(session)
                self.counts[kind.__name__.strip("_")] += 1
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError) as error:
                self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self.until:
            async with session.get("/health") as response:
                self._check(response.status == 200, f"/health {response.status}")
            async with session.get("/metrics") as response:
                self._check(response.status == 200, f"/metrics {response.status}")
            await asyncio.sleep(1)

    def _check(self, ok: bool, what: str) -> None:
        if not ok and len(self.wrong) < 100:
            self.wrong.append(what)

    def _known(self) -> tuple[dict[str, Any], list[str]]:
        body = dict(self.rng.choice(self.known))
        return body, body.pop("expected")

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        body, expected = self._known()
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
        self._check(response.status == 200, f"whole: {response.status} {answer}")
        got = [choice["text"] for choice in answer.get("choices", ())]
        self._check(got == expected, f"wrong answer to {body}: {got!r}, plain {expected!r}")

    async def _streamed(self, session: aiohttp.ClientSession) -> None:
        body, expected = self._known()
        texts = [""] * len(expected)
        async with session.post("/v1/completions", json={**body, "stream": True, "logprobs": 2}) as response:
            self._check(response.status == 200, f"streamed: {response.status}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
                if self.rng.random() < 0.01:
                    await asyncio.sleep(0.2)  # a slow reader
        self._check(texts == expected, f"wrong stream for {body}: {texts!r}, plain {expected!r}")

    async def _gone(self, session: aiohttp.ClientSession) -> None:
        body, _ = self._known()
        body |= {"stream": self.rng.random() < 0.5, "max_tokens": 400, "ignore_eos": True}
        try:
            async with asyncio.timeout(self.rng.uniform(0.0, 0.5)):
                async with session.post("/v1/completions", json=body) as response:
                    async for _line in response.content:
                        pass
        except TimeoutError:
            pass

    async def _json(self, session: aiohttp.ClientSession) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": self.rng.choice(WORDS)}]
        body = {"messages": messages, "max_tokens": 40, "response_format": wanted, "temperature": 1, "seed": 1}
        if not self.grammar:
            return await self._whole(session)
        async with session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        if response.status == 400 and "grammar" in answer["error"]["message"]:
            self.grammar = False  # no backend is installed
            return None
        self._check(response.status == 200, f"json: {response.status} {answer}")
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            self._check(isinstance(json.loads(choice["message"]["content"])["a"], int), f"not JSON: {choice}")
        return None

    async def _odd(self, session: aiohttp.ClientSession) -> None:
        body = self.rng.choice([{"prompt": ""}, {"prompt": [10**6]}, {"prompt": "x", "temperature": -1}, {}, []])
        async with session.post("/v1/completions", json=body) as response:
            await response.read()
        self._check(response.status == 400, f"odd: {response.status}")


def wait_until_idle(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stats = llm.stats()
        if not stats.num_running and not stats.num_waiting:
            return
        time.sleep(0.05)


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="in all (default: %(default)s)")
    parser.add_argument("--turn-seconds", type=float, default=60.0, help="of one proposer (default: %(default)s)")
    parser.add_argument("--most-growth", type=float, default=64.0, help="MiB of memory after the first round")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    turn = min(arguments.turn_seconds, 20 * arguments.minutes)
    report: dict[str, Any] = {"minutes": arguments.minutes, "turns": [], "wrong": []}
    after_first_round = None
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", Path(folder) / "model")
        known = references(model)
        number = 0
        ends = time.monotonic() + 60 * arguments.minutes
        while after_first_round is None or time.monotonic() < ends:
            for name, proposer in proposers().items():
                number += 1
                report["turns"].append(
                    _turn(model, name, proposer, known, turn, arguments.seed + number, report["wrong"])
                )
            if after_first_round is None:
                after_first_round = resident_mib()
    growth = resident_mib() - after_first_round
    report["growth_mib"] = growth
    if growth > arguments.most_growth:
        report["wrong"].append(f"memory grew by {growth:.0f} MiB after the first round")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"{len(report['turns'])} turns, memory {growth:+.1f} MiB after the first round, wrong: {len(report['wrong'])}"
    )
    for problem in report["wrong"][:20]:
        print("  ", problem[:400])
    return 1 if report["wrong"] else 0


def _turn(
    model: Path, name: str, proposer: Proposer, known: list[dict[str, Any]], seconds: float, seed: int, wrong: list[str]
) -> dict[str, Any]:
    with serving(model, proposer) as (url, llm):
        before = llm.stats()
        soak = Soak(url, known, time.monotonic() + seconds, seed)
        asyncio.run(soak.run())
        wait_until_idle(llm)
        stats = llm.stats()
        wrong += [f"{name}: {problem}" for problem in soak.wrong]
        if stats.free_blocks != before.total_blocks:
            wrong.append(f"{name}: {before.total_blocks - stats.free_blocks} KV blocks are not free")
        if not llm.is_running:
            wrong.append(f"{name}: the engine stopped")
    memory = resident_mib()
    counts = dict(soak.counts)
    print(
        f"{name}: {sum(counts.values())} requests {counts}, faults {stats.num_proposer_faults}, "
        f"{memory:.0f} MiB, wrong so far {len(wrong)}",
        flush=True,
    )
    return {"proposer": name, "requests": counts, "faults": stats.num_proposer_faults, "resident_mib": memory}


if __name__ == "__main__":
    sys.exit(main())
