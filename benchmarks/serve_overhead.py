"""What the server costs: tokens per second over HTTP against the same engine in process, and time to first token.

    python benchmarks/serve_overhead.py --rounds 3

Two engines with the same settings are loaded: one behind `specdec serve` in a process of its own, one used through
`AsyncLLM` in another. They take turns (the other one is stopped meanwhile) with 1 and with 16 streams; then each
answers single requests with prompts of 100 tokens at idle. Aims: at least 0.95 of the engine's tokens per second, and a
first token at most 10 ms later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from contextlib import aclosing, suppress
from typing import Any

import aiohttp
from common import PausedProcess, add_common, read_conversations, write_result

IN_PROCESS = "--in-process"


def engine_options(arguments: argparse.Namespace) -> list[str]:
    options = ["--model", arguments.model, "--num-threads", str(arguments.threads), "--dtype", arguments.dtype]
    options += ["--no-enable-prefix-caching", "--max-model-len", "2048"]
    if arguments.speculative_config:
        options += ["--speculative-config", arguments.speculative_config]
    return options


class Engine(PausedProcess):
    """One of the two, paused as soon as it says that it is ready."""

    def __init__(self, command: list[str], ready: str, **pipes: Any) -> None:
        super().__init__(command, **pipes)
        stream = self.process.stderr if "stderr" in pipes else self.process.stdout
        assert stream is not None
        for line in stream:
            if found := re.search(ready, line):
                self.found = found
                break
        else:
            raise SystemExit(f"{command} ended before it was ready")
        self.pause()


# --- over HTTP ----------------------------------------------------------------------------------


async def http_stream(session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> tuple[float, int]:
    """(seconds until the first piece, tokens) of one streamed completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                if b'"usage"' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return first, tokens


async def over_http(url: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        began = time.perf_counter()
        results = await asyncio.gather(*(http_stream(session, prompt, max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
    return {"rate": sum(tokens for _, tokens in results) / seconds, "first": [first for first, _ in results]}


async def until_ready(url: str, seconds: float = 300) -> None:
    """Wait until the server, which names its address before it listens, answers."""
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession(url) as session:
        while time.monotonic() < end:
            with suppress(aiohttp.ClientError):
                async with session.get("/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server at {url} is not ready after {seconds:g} s")


async def tokenise(url: str, texts: list[str]) -> list[list[int]]:
    ids = []
    async with aiohttp.ClientSession(url) as session:
        for text in texts:
            async with session.post("/tokenize", json={"prompt": text}) as response:
                ids.append((await response.json())["tokens"])
    return ids


# --- in process: this script again, answering a line of JSON with a line of JSON --------------------


async def in_process(arguments: argparse.Namespace) -> None:
    from specdec import AsyncLLM, SamplingParams
    from specdec.cli.parser import Parser
    from specdec.config.flags import add_config_flags, read_config

    parser = Parser()
    add_config_flags(parser)
    config, _ = read_config(parser.parse_args(engine_options(arguments)))
    llm = AsyncLLM.from_config(config)

    async def one(prompt: list[int], max_tokens: int) -> tuple[float, int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began, first, tokens = time.perf_counter(), 0.0, 0
        outputs = llm.generate({"prompt_token_ids": prompt}, params, output_kind="delta")
        async with aclosing(outputs):
            async for output in outputs:
                first = first or time.perf_counter() - began
                tokens += len(output.outputs[0].token_ids)
        return first, tokens

    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        work = json.loads(line)
        began = time.perf_counter()
        results = await asyncio.gather(*(one(prompt, work["max_tokens"]) for prompt in work["prompts"]))
        seconds = time.perf_counter() - began
        answer = {"rate": sum(tokens for _, tokens in results) / seconds, "first": [first for first, _ in results]}
        print(json.dumps(answer), flush=True)
    llm.close()


def ask(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    assert engine.process.stdin is not None
    assert engine.process.stdout is not None
    engine.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
    engine.process.stdin.flush()
    answer: dict[str, Any] = json.loads(engine.process.stdout.readline())
    return answer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    serve = [sys.executable, "-m", "specdec.cli.main", "serve", "--port", "0", *engine_options(arguments)]
    server = Engine(serve, r"at (http://\S+)", stderr=subprocess.PIPE)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    engine = Engine([sys.executable, __file__, IN_PROCESS, *sys.argv[1:]], "ready", **pipes)
    url = server.found[1]
    texts = [conversation[0]["content"] for conversation in read_conversations("spec_bench", 16, spread=True)]
    server.resume()
    asyncio.run(until_ready(url))
    prompts = asyncio.run(tokenise(url, texts))
    long_text = asyncio.run(tokenise(url, [" ".join(texts)]))[0]
    server.pause()
    hundred = [long_text[at : at + 100] for at in range(0, 100 * arguments.num_first, 100)]
    samples: dict[str, dict[str, list[float]]] = {"http": {}, "engine": {}}
    for number in range(arguments.rounds + 1):
        for side in ("http", "engine") if number % 2 else ("engine", "http"):
            running = server if side == "http" else engine
            running.resume()
            for label, work in (("streams_1", prompts[:1]), ("streams_16", prompts), *_singles(hundred)):
                max_tokens = 1 if label == "first" else arguments.max_tokens
                result = (
                    asyncio.run(over_http(url, work, max_tokens)) if side == "http" else ask(engine, work, max_tokens)
                )
                if number:  # the first round warms up
                    values = result["first"] if label == "first" else [result["rate"]]
                    samples[side].setdefault(label, []).extend(values)
                    if label != "first":
                        print(f"round {number}, {label}, {side}: {result['rate']:.1f} tokens/s", flush=True)
            running.pause()
    server.close()
    engine.close()
    return samples


def _singles(prompts: list[list[int]]) -> list[tuple[str, list[list[int]]]]:
    return [("first", [prompt]) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-first", type=int, default=10, help="prompts for the time to first token")
    parser.add_argument("--speculative-config", metavar="JSON")
    if IN_PROCESS in sys.argv:
        sys.argv.remove(IN_PROCESS)
        asyncio.run(in_process(parser.parse_args()))
        return
    arguments = parser.parse_args()
    samples = measure(arguments)
    medians = {side: {label: statistics.median(values) for label, values in of.items()} for side, of in samples.items()}
    for label in ("streams_1", "streams_16"):
        over, within = medians["http"][label], medians["engine"][label]
        print(f"{label}: {over:.1f} tokens/s over HTTP, {within:.1f} in process, ratio {over / within:.3f}")
    later = medians["http"]["first"] - medians["engine"]["first"]
    print(f"first token of 100: {1000 * medians['http']['first']:.1f} ms over HTTP, {1000 * later:+.1f} ms")
    write_result("serve_overhead", {"settings": vars(arguments), "medians": medians, "samples": samples}, arguments.out)


if __name__ == "__main__":
    main()
