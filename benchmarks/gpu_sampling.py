"""The Triton sampling backend on a GPU: correctness against the reference in torch, and times beside it.

    python benchmarks/gpu_sampling.py

Checks draws, normalizers, acceptance and recovery for seven vocabularies in float32 and bfloat16, with -inf, NaN and
equal logits. Then times, in microseconds, for 32 requests with 5 draft tokens each (192 rows):

    draw         one token of every row at temperature 1 (what the verifier `match` does)
    greedy       the same at temperature 0
    rejection    normalizers of the draft rows, acceptance, one recovered token per request
    softmax      torch.softmax of all rows, for comparison
    gumbel       torch's usual draw: softmax, exponential noise, argmax

It takes under five minutes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from common import write_result
from gpu_common import device_or_exit, gpu, microseconds, parse, show

VOCABULARIES = (1, 2, 1000, 32_000, 50_257, 151_936, 262_144)


def main() -> int:
    arguments = parse(__doc__)
    device = device_or_exit(arguments)
    begin = time.monotonic()
    checks = [
        (vocab, name, *check(vocab, name, device, 32 if not arguments.dry_run else 3))
        for vocab in (VOCABULARIES if not arguments.dry_run else (1, 50))
        for name in ("float32", "bfloat16")
    ]
    show("correctness", ("vocabulary", "dtype", "draws", "wrong", "near ties", "normalizer error"), checks)
    wrong = [f"{vocab} {name}" for vocab, name, _, bad, _, error in checks if bad or not error < 1e-5]
    if wrong:
        print(f"\nWRONG: {', '.join(wrong)}", file=sys.stderr)
    rows = []
    for vocab in (32_000, 151_936, 262_144) if not arguments.dry_run else (50,):
        for name in ("float32", "bfloat16"):
            if time.monotonic() - begin < arguments.seconds:
                rows.append(measure(vocab, name, device, *((32, 5) if not arguments.dry_run else (1, 1))))
    header = ("vocabulary", "dtype", "rows", "draw", "greedy", "rejection", "draw, torch", "softmax", "gumbel")
    show("time, microseconds", header, rows)
    result = {"settings": gpu(), "wrong": wrong, "checks": checks, "columns": header, "rows": rows}
    result["seconds"] = time.monotonic() - begin
    write_result("gpu_sampling", result, arguments.out)
    return 1 if wrong else 0


def check(vocab: int, dtype: str, device: str, rows: int) -> tuple[int, int, int, float]:
    """Compare all answers for one vocabulary: how many, how many wrong, near-ties, largest error of a normalizer."""
    import torch

    from specdec.sampling import noise
    from specdec.sampling.torch_backend import TorchSampling
    from specdec_kernels_triton.backend import TritonSampling

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[0, ::2] = -torch.inf
    logits[0, -1] = 0.5
    logits[1] = 2.5
    logits[2, vocab // 2] = torch.nan
    logits = logits.to(device, getattr(torch, dtype))
    temperature = torch.where(torch.arange(rows) % 4 == 1, 0.0, 0.5 + torch.rand(rows, generator=generator)).to(device)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(device)
    positions = torch.randint(0, 2**40, (rows,), generator=generator).to(device)
    drafted = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    laws = torch.rand(rows, vocab, generator=generator).to(device).softmax(dim=1)
    keys = (temperature, seeds, positions)
    mine, reference = TritonSampling(), TorchSampling()
    statistics, wanted = mine.statistics(logits, temperature), reference.statistics(logits, temperature)
    bad = int((statistics.tokens != wanted.tokens).sum())
    drawn, right = mine.draw(logits, *keys), reference.draw(logits, *keys)
    ties = 0
    for row in (drawn != right).nonzero()[:, 0].tolist():
        score = logits[row].double() / temperature[row].double()
        score -= noise.exponentials(seeds[row : row + 1], positions[row : row + 1], vocab)[0].log()
        best = score.topk(2).values
        near = bool(best[0] - best[1] <= 1e-5 * best[0].abs())
        ties, bad = ties + near, bad + (not near)
    for given in ({}, {"draft_probs": laws}):
        arguments = (logits, wanted, drafted, *keys)
        bad += int((mine.accept(*arguments, **given) != reference.accept(*arguments, **given)).sum())
        bad += int((mine.recover(*arguments, **given) != reference.recover(*arguments, **given)).sum())
    error = (statistics.log_normalizers - wanted.log_normalizers).abs().nan_to_num(0.0).max().item()
    if not torch.equal(statistics.log_normalizers.isnan(), wanted.log_normalizers.isnan()):
        bad += 1
    return 6 * rows, bad, ties, error


def measure(vocab: int, dtype: str, device: str, requests: int, drafts: int) -> tuple[Any, ...]:
    """One row of the table."""
    import torch

    from specdec.sampling.torch_backend import TorchSampling
    from specdec_kernels_triton.backend import TritonSampling

    rows = requests * (drafts + 1)
    logits = (torch.randn(rows, vocab, device=device) * 3).to(getattr(torch, dtype))
    ones, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
    keys = (ones, seeds, seeds + 7)
    with_draft = torch.arange(rows, device=device).view(requests, -1)[:, :-1].flatten()
    first = with_draft.view(requests, -1)[:, 0]
    laws = torch.randn(len(with_draft), vocab, device=device).softmax(dim=1)
    tokens = torch.randint(0, vocab, (len(with_draft),), device=device)
    mine, reference = TritonSampling(), TorchSampling()
    law_rows = torch.arange(requests, device=device) * drafts

    def rejection() -> Any:
        some = (ones[with_draft], seeds[with_draft], seeds[with_draft])
        statistics = mine.statistics(logits, some[0], with_draft)
        mine.accept(logits, statistics, tokens, *some, draft_probs=laws, rows=with_draft)
        few = (ones[first], seeds[first], seeds[first])
        return mine.recover(
            logits, statistics.at(law_rows), tokens[law_rows], *few, draft_probs=laws, draft_rows=law_rows, rows=first
        )

    def gumbel() -> Any:
        probs = logits.float().softmax(dim=-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)

    calls = (
        lambda: mine.draw(logits, *keys),
        lambda: mine.draw(logits, torch.zeros_like(ones), *keys[1:]),
        rejection,
        lambda: reference.draw(logits, *keys),
        lambda: logits.float().softmax(dim=-1),
        gumbel,
    )
    return (vocab, dtype, rows, *(microseconds(call, device) for call in calls))


if __name__ == "__main__":
    sys.exit(main())
