"""What verification costs beside plain sampling of the same rows.

    python benchmarks/verify.py --requests 16 --draft-tokens 4 --vocab 49152

All cases take turns in one process, round after round: one call of the plain sampler over all rows, and the verifiers
on the same rows with drafts of two kinds, one-hot and with probabilities. Logits are random, with a few likely tokens
in each row as a language model has them; draft tokens are drawn from a law near the target's. Times are medians over
the rounds; the ratios are the median of each round's ratio.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true", help="of the calling thread, for a busy machine")
    parser.add_argument("--out", metavar="FILE")
    arguments = parser.parse_args()
    cells = measure(arguments)
    show(cells)
    names = ("requests", "draft_tokens", "vocab", "dtype", "temperature", "rounds", "threads", "cpu_time")
    write_result(
        "verify", {"settings": {name: getattr(arguments, name) for name in names}, "cells": cells}, arguments.out
    )
    return 0


def cases(arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Name of each case and what it calls."""
    import attrs
    import torch

    from specdec.drafting.sampling import DraftSampler
    from specdec.registry import Registry
    from specdec.sampling.sampler import sample, warm_up
    from specdec.testing.context import engine_context
    from specdec.testing.laws import sampling_of, step_rows
    from specdec.types import Draft

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    warm_up("cpu")
    count, k, vocab = arguments.requests, arguments.draft_tokens, arguments.vocab
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(count * (k + 1), vocab, generator=generator)
    likely = torch.randint(0, vocab, (len(logits), 6), generator=generator)
    logits.scatter_(1, likely, torch.tensor([17.0, 16.0, 15.0, 14.0, 13.0, 12.0]).expand(len(logits), 6))
    logits = logits.to(getattr(torch, arguments.dtype))
    deciding = torch.arange(count * k) + torch.arange(count).repeat_interleave(k)
    near = logits[deciding].float() + 0.5 * torch.randn(count * k, vocab, generator=generator)
    heat = torch.full((count * k,), arguments.temperature)
    seeds, positions = torch.arange(count * k), torch.full((count * k,), 9)
    tokens, probs = DraftSampler("probabilistic").choose(near, heat, seeds, positions, draft_position=0)
    chain = Draft(token_ids=tokens, num_draft_tokens=torch.full((count,), k).int())
    with_probs = attrs.evolve(chain, draft_probs=probs)
    rows = attrs.evolve(step_rows(logits, chain, torch.full((count,), 9)), max_draft_tokens=k)
    sampling = sampling_of(torch.arange(count), arguments.temperature)
    registry = Registry()

    def verifier(name: str) -> Any:
        config = registry.plugin_config("verifier", name, {})
        return registry.create("verifier", name, "verify", config=config, engine=engine_context(vocab_size=vocab))

    def verify(name: str, draft: Draft) -> Callable[[], Any]:
        made = verifier(name)
        return lambda: made.verify(rows, draft, sampling)

    return {
        "plain": lambda: sample(rows.logits, rows, sampling),
        "match, one-hot": verify("match", chain),
        "rejection, one-hot": verify("rejection", chain),
        "rejection, probs": verify("rejection", with_probs),
        "block, probs": verify("block", with_probs),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Median milliseconds of each case, its ratio to plain sampling, and the draft tokens it keeps."""
    calls = cases(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    for _ in range(arguments.rounds + 3):
        for name, call in calls.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    plain = seconds["plain"][3:]
    cells = []
    for name, call in calls.items():
        ratios = [one / other for one, other in zip(seconds[name][3:], plain, strict=True)]
        cell = {"case": name, "median_ms": 1000 * median(seconds[name][3:]), "ratio_to_plain": median(ratios)}
        if name != "plain":
            cell["kept_draft_tokens"] = float(call().num_tokens.float().mean()) - 1
        cells.append(cell)
    return cells


def show(cells: list[dict[str, Any]]) -> None:
    print(f"{'case':<22}{'ms':>9}{'x plain':>10}{'kept':>8}")
    for cell in cells:
        kept = f"{cell['kept_draft_tokens']:.2f}" if "kept_draft_tokens" in cell else ""
        print(f"{cell['case']:<22}{cell['median_ms']:>9.3f}{cell['ratio_to_plain']:>10.2f}{kept:>8}")


if __name__ == "__main__":
    sys.exit(main())
