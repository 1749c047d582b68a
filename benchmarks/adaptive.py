"""`speculation = "auto"` against every fixed draft length and against plain decoding.

    python benchmarks/adaptive.py                         # n-gram, all prompt sets, batch 1, 8 and 32
    python benchmarks/adaptive.py --batch-sizes 1 --sets random --max-tokens 256

All variants take turns in one process, with three engines: plain, one for all fixed lengths, which requests ask for,
and auto. For each prompt set and batch size the result has tokens per second of plain decoding, of each k, and of auto,
and the two ratios that matter: auto to the best fixed k, and auto to plain. Each is a ratio of medians over the
rounds, and, because neighbours disturb a machine more than a few percent, also the mean over rounds of the ratio within
a round, with its standard error.
The set `random` is text of random tokens at a high temperature, for which nothing can be guessed. The result file is
written after each cell.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from typing import Any

from common import HERE, add_common, write_result

from specdec.cli import measuring
from specdec.cli.prompts import Prompt, read_file
from specdec.config import from_kwargs
from specdec.sampling.params import SamplingParams

SETS = ("code_edit", "spec_bench", "random")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--speculative", default='{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(range(1, 9)), help="fixed k to compare with")
    parser.add_argument("--num-prompts", type=int, default=8, help="at batch 1; a larger batch takes at least its size")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    work = ("model", "dtype", "threads", "speculative", "num_prompts", "max_tokens", "rounds")
    settings = {name: getattr(arguments, name) for name in work}
    cells: list[dict[str, Any]] = []
    for batch_size in arguments.batch_sizes:
        for name in arguments.sets:
            cells.append(measure(arguments, name, batch_size))
            print(line(cells[-1]), flush=True)
            # after each cell, so that a run that is interrupted keeps what it measured
            write_result("adaptive", {"settings": settings, "cells": cells}, arguments.out)
    return 0


def line(cell: dict[str, Any]) -> str:
    """What one cell says."""
    return (
        f"{cell['set']:12s} batch {cell['batch_size']:3d}  plain {cell['plain']:8.1f}  "
        f"best k={cell['best_k']} {cell['best']:8.1f}  auto {cell['auto']:8.1f} tok/s  "
        f"auto/best {cell['auto_to_best']:.3f} ({told(cell['auto_to_best_by_round'])})  "
        f"auto/plain {cell['auto_to_plain']:.3f} ({told(cell['auto_to_plain_by_round'])})"
    )


def told(by_round: dict[str, float]) -> str:
    return f"by round {by_round['mean']:.3f} ± {by_round['standard_error']:.3f}"


def ratio_by_round(rates: list[float], others: list[float]) -> dict[str, float]:
    """Geometric mean over rounds of how many times as fast, and its standard error."""
    logarithms = [math.log(rate / other) for rate, other in zip(rates, others, strict=True)]
    spread = statistics.stdev(logarithms) if len(logarithms) > 1 else math.nan
    mean = math.exp(statistics.mean(logarithms))
    return {"mean": mean, "standard_error": mean * spread / math.sqrt(len(logarithms))}


def measure(arguments: argparse.Namespace, name: str, batch_size: int) -> dict[str, Any]:
    """One prompt set at one batch size."""
    variants = variants_of(arguments, batch_size)
    prompts = read_prompts(name, max(arguments.num_prompts, batch_size))
    temperature = 1.5 if name == "random" else 0.0
    params = SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=name == "random")
    with measuring.progress(arguments.rounds, variants, len(prompts), show=sys.stderr.isatty()) as bar:
        measuring.measure(
            variants, prompts, params, rounds=arguments.rounds, batch_size=batch_size, advance=bar.advance
        )
    summaries = {variant.name: measuring.summary(variant, variants[0]) for variant in variants}
    rate = {variant: numbers["tokens_per_second"] for variant, numbers in summaries.items()}
    best_k = max(arguments.lengths, key=lambda k: rate[f"k={k}"])
    best_name = f"k={best_k}" if rate[f"k={best_k}"] > rate["plain"] else "plain"
    best = rate[best_name]
    rounds = {name: numbers["tokens_per_second_per_round"] for name, numbers in summaries.items()}
    return {
        "set": name,
        "batch_size": batch_size,
        "plain": rate["plain"],
        "best_k": 0 if best_name == "plain" else best_k,
        "best": best,
        "auto": rate["auto"],
        "auto_to_best": rate["auto"] / best,
        "auto_to_plain": rate["auto"] / rate["plain"],
        "auto_to_best_by_round": ratio_by_round(rounds["auto"], rounds[best_name]),
        "auto_to_plain_by_round": ratio_by_round(rounds["auto"], rounds["plain"]),
        "variants": summaries,
    }


def variants_of(arguments: argparse.Namespace, batch_size: int) -> list[measuring.Variant]:
    """Plain decoding, every fixed k, and auto."""
    options = json.loads(arguments.speculative)
    longest = {"num_speculative_tokens": max(arguments.lengths)}
    plain, always, auto = [
        from_kwargs(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=1024,
            max_num_seqs=max(batch_size, 1),
            num_threads=arguments.threads,
            kv_cache_memory="1GiB" if batch_size > 8 else "256MiB",
            enable_prefix_caching=False,
            stat_loggers=(),
            speculative_config=None if speculation is None else {**options, **longest, "speculation": speculation},
        )
        for speculation in (None, "always", "auto")
    ]
    fixed = [measuring.Variant(f"k={k}", always, speculation={"num_speculative_tokens": k}) for k in arguments.lengths]
    return [measuring.Variant("plain", plain), *fixed, measuring.Variant("auto", auto)]


def read_prompts(name: str, count: int) -> list[Prompt]:
    """The first prompts of a set, again from the beginning when there are too few."""
    if name == "random":
        numbers = random.Random(0)
        return [Prompt(id=str(i), token_ids=tuple(numbers.choices(range(1000, 40000), k=64))) for i in range(count)]
    prompts = read_file(HERE / "prompts" / f"{name}.jsonl")
    return [prompts[i % len(prompts)] for i in range(count)]


if __name__ == "__main__":
    sys.exit(main())
