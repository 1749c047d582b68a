"""Time of a step outside the target's forward pass, at several batch sizes and context lengths.

The model is a tiny random one with the vocabulary of a real one: what is measured does not depend on the model's size
but for the vocabulary. A step's overhead is its wall time less the target's forward pass, split as the engine's
statistics split it; the median over the decode steps is reported. "plain" does not speculate, "ngram" proposes n-grams
and seldom finds one in random text, "drafts" verifies a draft of five wrong tokens for every request in every step.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --contexts 100,1000 --batches 1 --method ngram --temperature 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from statistics import median
from typing import Any

import numpy as np
from common import write_result

METHODS = ("plain", "ngram", "drafts")
K = 5
STAGES = ("propose_seconds", "verify_seconds", "rest_seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--contexts", default="100,1000,8000")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured in each cell")
    parser.add_argument("--method", action="append", choices=METHODS, help="all when not given")
    parser.add_argument("--temperature", type=float, action="append", help="0 and 1 when not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, arguments.vocab_size)
        for method in arguments.method or METHODS:
            for batch in map(int, arguments.batches.split(",")):
                for context in map(int, arguments.contexts.split(",")):
                    for temperature in arguments.temperature or [0.0, 1.0]:
                        cell = {"method": method, "batch": batch, "context": context, "temperature": temperature}
                        cells.append(cell | measure(model, arguments, **cell))
                        show(cells[-1])
    settings = {"vocab_size": arguments.vocab_size, "steps": arguments.steps, "threads": arguments.threads}
    write_result("overhead", {"settings": settings, "cells": cells}, arguments.out)
    return 0


def make_model(folder: str, vocab_size: int) -> str:
    from specdec.testing.models import tiny_model

    return str(tiny_model("llama", folder, vocab_size=vocab_size, max_position_embeddings=16384))


def measure(
    model: str, arguments: argparse.Namespace, *, method: str, batch: int, context: int, temperature: float
) -> dict[str, Any]:
    """Overhead of the decode steps of one cell."""
    most = (K + 1) * (arguments.steps + 20)
    frontend = open_engine(model, method, max_num_seqs=batch, max_len=context + most, threads=arguments.threads)
    fill(frontend, batch, context, most, temperature)
    steps = [step_overhead(frontend) for _ in range(arguments.steps)]
    frontend.close()
    total = [sum(step[stage] for stage in STAGES) for step in steps]
    return {
        "overhead_ms": 1000 * median(total),
        **{stage.replace("_seconds", "_ms"): 1000 * median(step[stage] for step in steps) for stage in STAGES},
        "target_ms": 1000 * median(step["target_seconds"] for step in steps),
        "tokens_per_step": sum(step["num_generated"] for step in steps) / len(steps),
    }


def open_engine(model: str, method: str, *, max_num_seqs: int, max_len: int, threads: int) -> Any:
    from specdec.config import from_kwargs
    from specdec.engine.frontend import Frontend
    from specdec.testing.oracles import WrongProposer

    speculative = {"method": method, "num_speculative_tokens": K, "speculation": "always"}
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    config = from_kwargs(
        model,
        dtype="float32",
        num_threads=threads,
        max_num_seqs=max_num_seqs,
        max_model_len=max_len,
        kv_cache_memory="2GiB",
        stat_loggers=[],
        speculative_config=None if method == "plain" else speculative,
    )
    return Frontend(config, WrongProposer(9) if method == "drafts" else None)


def fill(frontend: Any, batch: int, context: int, max_tokens: int, temperature: float) -> None:
    """Bring ``batch`` requests to decoding. They share their prompt, so that it is computed once."""
    from specdec.sampling.params import SamplingParams

    prompt = np.random.default_rng(0).integers(10, frontend.context.target_info.vocab_size, context).tolist()
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=1)
    for number in (1, batch - 1):
        for _ in range(number):
            frontend.submit(frontend.prepare({"prompt_token_ids": prompt}, params, None))
        while any(not group.requests[0].num_output_tokens for group in frontend.groups.values()):
            frontend.step()
    for _ in range(10):
        frontend.step()


def step_overhead(frontend: Any) -> dict[str, float]:
    """What one step added to the engine's statistics."""
    before = frontend.stats()
    frontend.step()
    added = frontend.stats().since(before)
    found = {stage: getattr(added, stage) for stage in (*STAGES, "target_seconds")}
    return {**found, "num_generated": added.num_generated_tokens}


def show(cell: dict[str, Any]) -> None:
    print(
        f"{cell['method']:6} batch {cell['batch']:3} context {cell['context']:5} temperature {cell['temperature']:g}: "
        f"overhead {cell['overhead_ms']:6.2f} ms (propose {cell['propose_ms']:.2f}, verify {cell['verify_ms']:.2f}, "
        f"rest {cell['rest_ms']:.2f}); target {cell['target_ms']:.2f} ms; {cell['tokens_per_step']:.1f} tokens a step",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
