"""Time to propose n-grams for many requests with long texts.

    python benchmarks/ngram_propose.py --requests 64 --tokens 4000

Each step adds a few tokens to every request, as verification would, and then asks for drafts. Two kinds of text: one
where much repeats and one where nothing does.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from common import write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    cells = [measure(arguments, text) for text in ("repeating", "random")]
    settings = {name: getattr(arguments, name) for name in ("requests", "tokens", "steps", "k")}
    write_result("ngram_propose", {"settings": settings, "cells": cells}, arguments.out)
    return 0


def make_texts(kind: str, requests: int, length: int) -> list[np.ndarray]:
    """int64 texts of ``length`` tokens: made of twenty phrases, or random."""
    rng = np.random.default_rng(0)
    if kind == "random":
        return [rng.integers(0, 50000, length) for _ in range(requests)]
    phrases = rng.integers(0, 50000, (20, 12))
    return [
        phrases[rng.integers(0, 20, length // 12 + 1)].reshape(-1)[:length].astype(np.int64) for _ in range(requests)
    ]


def measure(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Median and 99th percentile of a propose call, in milliseconds."""
    from specdec.registry import Registry
    from specdec.testing.context import engine_context

    registry = Registry()
    config = registry.plugin_config("proposer", "ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 4})
    context = engine_context(vocab_size=50000, num_speculative_tokens=arguments.k)
    proposer = registry.create("proposer", "ngram", "propose", config=config, engine=context)
    proposer.load(None)
    texts = make_texts(kind, arguments.requests, arguments.tokens + 4 * arguments.steps)
    lengths = np.full(arguments.requests, arguments.tokens, dtype=np.int64)
    rng = np.random.default_rng(1)
    seconds, drafted = [], 0
    propose(proposer, texts, lengths, arguments.k)  # the first call indexes the prompts
    for _ in range(arguments.steps):
        lengths += rng.integers(1, 5, arguments.requests)
        begin = time.perf_counter()
        draft = propose(proposer, texts, lengths, arguments.k)
        seconds.append(time.perf_counter() - begin)
        drafted += int(draft.num_draft_tokens.sum())
    cell = {
        "text": kind,
        "median_ms": 1000 * median(seconds),
        "p99_ms": 1000 * float(np.quantile(seconds, 0.99)),
        "draft_tokens_per_request": drafted / (arguments.steps * arguments.requests),
    }
    print(f"{kind}: median {cell['median_ms']:.3f} ms, p99 {cell['p99_ms']:.3f} ms a step", flush=True)
    return cell


def propose(proposer: Any, texts: list[np.ndarray], lengths: np.ndarray, k: int) -> Any:
    """One call, with the input built as the engine builds it."""
    from specdec.types import ProposalInput

    return proposer.propose(
        ProposalInput(
            request_ids=tuple(map(str, range(len(texts)))),
            token_ids=tuple(text[:length] for text, length in zip(texts, lengths, strict=True)),
            max_draft_tokens=np.full(len(texts), k, dtype=np.int32),
            token_pointers=np.array([text.ctypes.data for text in texts], dtype=np.int64),
            num_tokens=lengths,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
