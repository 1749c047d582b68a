"""Suffix decoding: what the index costs and finds, and what it makes of decoding.

    python benchmarks/suffix.py cache --tokens 8000
    python benchmarks/suffix.py decode --set agent --rounds 3

``cache`` shows one request of a long context to the method token by token (update and draft for each), and then draft
by draft, counting what would be accepted. With arctic-inference installed, its suffix cache takes turns on the same
texts. ``decode`` runs plain decoding, n-gram lookup and suffix decoding in turns in one process, on prompts that come
again with small changes (``agent``) or on code edits (``code_edit``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Protocol

import numpy as np
from common import HERE, add_common, write_result

from specdec.sampling.params import SamplingParams
from specdec.types import ProposalInput, RequestInfo


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="cost and acceptance of the index alone")
    cache.add_argument("--tokens", type=int, default=8000, help="context before the first step (default: %(default)s)")
    cache.add_argument("--steps", type=int, default=500, help="tokens of output (default: %(default)s)")
    cache.add_argument("--past", type=int, default=50, help="past responses (default: %(default)s)")
    cache.add_argument("--rounds", type=int, default=3)
    cache.add_argument("--k", type=int, default=16)
    cache.add_argument("--depth", type=int, default=24)
    cache.add_argument("--out", metavar="FILE")
    decode = commands.add_parser("decode", help="tokens per second of a model")
    add_common(decode)
    decode.add_argument("--set", choices=("agent", "code_edit"), default="agent")
    decode.add_argument("--prompts", type=int, default=8)
    decode.add_argument("--repeats", type=int, default=4, help="how often each agent prompt is asked")
    decode.add_argument("--max-tokens", type=int, default=128)
    decode.add_argument("--rounds", type=int, default=3)
    decode.add_argument("--dtype", default="bfloat16")
    decode.add_argument("--k", type=int, default=8)
    arguments = parser.parse_args()
    return measure_caches(arguments) if arguments.command == "cache" else measure_decoding(arguments)


# --- the index alone ----------------------------------------------------------------------------


class Cache(Protocol):
    """A suffix cache that serves one request at a time."""

    def respond(self, prompt: np.ndarray, response: np.ndarray) -> None:
        """Take in a past response."""

    def begin(self, prompt: np.ndarray) -> None:
        """A request starts."""

    def step(self, text: np.ndarray, added: int) -> Sequence[int]:
        """The text has grown by the last ``added`` tokens; the draft for it."""

    def end(self) -> None:
        """The request ends without being stored."""


class Ours:
    """`specdec-suffix` through its proposer, as an engine calls it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from specdec.registry import Registry
        from specdec.testing import engine_context

        registry = Registry()
        options = {"suffix_decoding_max_tree_depth": arguments.depth}
        config = registry.plugin_config("proposer", "suffix", options)
        context = engine_context(vocab_size=1 << 20, num_speculative_tokens=arguments.k)
        self._proposer = registry.create("proposer", "suffix", "propose", config=config, engine=context)
        self._proposer.load(None)
        self._limits = np.array([arguments.k], dtype=np.int32)

    def respond(self, prompt: np.ndarray, response: np.ndarray) -> None:
        self.begin(prompt)
        self._proposer.complete("r", np.concatenate([prompt, response]))
        self.end()

    def begin(self, prompt: np.ndarray) -> None:
        """Texts of the request's steps start in the same memory as its prompt, so that its address is known."""
        self._pointer = prompt.ctypes.data
        self._proposer.start(
            RequestInfo(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0), seed=0)
        )

    def step(self, text: np.ndarray, added: int) -> Sequence[int]:
        draft = self._proposer.propose(
            ProposalInput(
                request_ids=("r",),
                token_ids=(text,),
                max_draft_tokens=self._limits,
                token_pointers=np.array([self._pointer], dtype=np.int64),
                num_tokens=np.array([len(text)], dtype=np.int64),
            )
        )
        return draft.token_ids.tolist()

    def end(self) -> None:
        self._proposer.finish("r")


class Arctic:
    """`arctic_inference.suffix_decoding.SuffixDecodingCache`, called as vLLM does."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._depth, self._k = arguments.depth, arguments.k
        self._cache = SuffixDecodingCache(max_tree_depth=arguments.depth, max_cached_requests=10_000)
        self._number = 0

    def respond(self, prompt: np.ndarray, response: np.ndarray) -> None:
        self.begin(prompt)
        self._cache.add_active_response(self._number, response.astype(np.int32))
        self._cache.stop_request(self._number)

    def begin(self, prompt: np.ndarray) -> None:
        self._number += 1
        self._cache.start_request(self._number, prompt.astype(np.int32))

    def step(self, text: np.ndarray, added: int) -> Sequence[int]:
        if added:
            self._cache.add_active_response(self._number, text[-added:].astype(np.int32))
        pattern = text[-self._depth :].astype(np.int32)
        draft = self._cache.speculate(self._number, pattern, max_spec_tokens=self._k, min_token_prob=0.1)
        return draft.token_ids

    def end(self) -> None:
        self._cache.stop_request(self._number)
        self._cache.evict_cached_response(self._number)


def measure_caches(arguments: argparse.Namespace) -> int:
    caches: dict[str, Callable[[argparse.Namespace], Cache]] = {"specdec-suffix": Ours}
    if find_spec("arctic_inference") is not None:
        caches["arctic-inference"] = Arctic
    cells = []
    for kind in ("agent", "code edit", "random"):
        past, prompt, output = make_trace(kind, arguments)
        text = np.concatenate([prompt, output])
        found: dict[str, list[dict[str, float]]] = {name: [] for name in caches}
        for number in range(arguments.rounds):
            for name in list(caches)[:: 1 if number % 2 else -1]:
                cache = caches[name](arguments)
                for its_prompt, response in past:
                    cache.respond(its_prompt, response)
                found[name].append(one_round(cache, text, len(prompt)))
        for name, rounds in found.items():
            cell = {"text": kind, "cache": name} | {key: median(one[key] for one in rounds) for key in rounds[0]}
            cells.append(cell)
            print(
                f"{kind:<10} {name:<17} {cell['us_per_token']:7.1f} us a token (update and draft), "
                f"first step {cell['first_ms']:.1f} ms, acceptance length {cell['acceptance_length']:.2f}",
                flush=True,
            )
    settings = {key: getattr(arguments, key) for key in ("tokens", "steps", "past", "rounds", "k", "depth")}
    write_result("suffix-cache", {"settings": settings, "cells": cells}, arguments.out)
    return 0


def make_trace(
    kind: str, arguments: argparse.Namespace
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    """Past prompts and responses, a long prompt and its output; int64.

    ``agent``: the output is a past response with one token in twenty changed. ``code edit``: a copy of a part of the
    prompt, changed in the same way. ``random``: nothing repeats but by chance.
    """
    rng = np.random.default_rng(0)
    words = list(tokens_of_prompts())
    known = {word: i for i, word in enumerate(dict.fromkeys(words))}
    corpus = np.array([known[word] for word in words], dtype=np.int64)
    if kind == "random":
        corpus = rng.integers(0, 50_000, len(corpus))
    prompt = np.resize(corpus, arguments.tokens)
    pieces = np.split(corpus[: len(corpus) // arguments.steps * arguments.steps], len(corpus) // arguments.steps)
    past = [(prompt[:50], rng.permutation(pieces[i % len(pieces)])) for i in range(arguments.past)]
    if kind == "random":
        return past, prompt, rng.integers(0, 50_000, arguments.steps)
    output = changed(prompt[len(prompt) // 3 :][: arguments.steps], rng)
    if kind == "agent":
        prompt = rng.permutation(prompt)
        past[len(past) // 2] = (prompt[:50], changed(output, rng))
    return past, prompt, output


def tokens_of_prompts() -> Iterator[str]:
    """Words, spaces and signs of the code-edit prompts."""
    for line in (HERE / "prompts" / "code_edit.jsonl").read_text(encoding="utf-8").splitlines():
        yield from re.findall(r"\w+|\s+|.", json.loads(line)["turns"][0])


def changed(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy with one token in twenty replaced by another one of it."""
    copy = tokens.copy()
    places = rng.random(len(copy)) < 0.05
    copy[places] = rng.choice(tokens, int(places.sum()))
    return copy


def one_round(cache: Cache, text: np.ndarray, begin: int) -> dict[str, float]:
    """Token by token for the cost, then draft by draft for the acceptance."""
    start = time.perf_counter()
    cache.begin(text[:begin])
    cache.step(text[:begin], 0)
    first = time.perf_counter() - start
    seconds = []
    for end in range(begin + 1, len(text) + 1):
        now = text[:end]
        start = time.perf_counter()
        cache.step(now, 1)
        seconds.append(time.perf_counter() - start)
    cache.end()
    return {
        "us_per_token": 1e6 * median(seconds),
        "p99_us_per_token": 1e6 * float(np.quantile(seconds, 0.99)),
        "first_ms": 1000 * first,
        "acceptance_length": acceptance_length(cache, text, begin),
    }


def acceptance_length(cache: Cache, text: np.ndarray, begin: int) -> float:
    """Tokens gained per step if the target says exactly this text."""
    cache.begin(text[:begin])
    at, added, steps = begin, 0, 0
    while at < len(text):
        draft = cache.step(text[:at], added)
        accepted = 0
        while accepted < len(draft) and at + accepted < len(text) and draft[accepted] == text[at + accepted]:
            accepted += 1
        added = min(accepted + 1, len(text) - at)
        at += added
        steps += 1
    cache.end()
    return (len(text) - begin) / steps


# --- decoding -----------------------------------------------------------------------------------


def measure_decoding(arguments: argparse.Namespace) -> int:
    from specdec.cli import measuring
    from specdec.cli.prompts import Prompt
    from specdec.config import SpeculativeConfig, from_kwargs

    config = from_kwargs(
        arguments.model,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        enable_prefix_caching=False,
        stat_loggers=(),
    )
    ngram = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    speculative = [
        SpeculativeConfig(method="ngram", num_speculative_tokens=arguments.k, options=ngram),
        SpeculativeConfig(method="suffix", num_speculative_tokens=arguments.k),
    ]
    variants = measuring.variants_of(config, speculative)
    texts = decode_prompts(arguments)
    prompts = [Prompt(id=str(i), text=text).as_chat() for i, text in enumerate(texts)]
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with measuring.progress(arguments.rounds, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure(variants, prompts, params, rounds=arguments.rounds, batch_size=1, advance=bar.advance)
    summaries = [measuring.summary(variant, variants[0]) for variant in variants]
    for variant in variants:
        print(
            f"{variant.name}: {variant.median_rate:.1f} tokens/s, x{variant.median_rate / variants[0].median_rate:.2f}"
        )
    settings = {key: value for key, value in vars(arguments).items() if key not in ("command", "out")}
    write_result(f"suffix-{arguments.set}", {"settings": settings, "variants": summaries}, arguments.out)
    return 0


def decode_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of a set; those of an agent come again with a changed number of the attempt and a changed end."""
    name = "spec_bench" if arguments.set == "agent" else arguments.set
    lines = (HERE / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    spread = [json.loads(lines[i * len(lines) // arguments.prompts])["turns"][0] for i in range(arguments.prompts)]
    if arguments.set != "agent":
        return spread
    return [f"Attempt {turn + 1}. {text}" for turn in range(arguments.repeats) for text in spread]


if __name__ == "__main__":
    sys.exit(main())
