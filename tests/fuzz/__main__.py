"""Runs cases of the fuzz by number: ``python -m tests.fuzz FIRST LAST [SECONDS]``; failures are printed."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.run import Fuzz


def main() -> int:
    """Run the range until it or the time ends."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    end = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else float("inf"))
    torch.set_num_threads(1)
    fuzz = Fuzz(Checkpoints(Path(tempfile.gettempdir()) / "specdec-fuzz"))
    ran = refused = failed = 0
    counts = [0, 0, 0, 0]
    for seed in range(first, last):
        if time.monotonic() > end:
            break
        ran += 1
        try:
            result = fuzz.run(seed)
        except Exception:
            failed += 1
            print(f"==== seed {seed}\n{traceback.format_exc()}", flush=True)
            continue
        counts = [a + b for a, b in zip(counts, result.counts, strict=True)]
        if result.refused:
            refused += 1
            print(f"refused: {result.description}: {result.refused}", flush=True)
        if result.problems:
            failed += 1
            print(f"==== {result.description}", *result.problems, sep="\n", flush=True)
        if ran % 20 == 0:
            print(
                f"# {ran} run, {failed} failed, {refused} refused; drafts, accepted, preempted, cached {counts}",
                flush=True,
            )
    print(f"# {ran} run, {failed} failed, {refused} refused; drafts, accepted, preempted, cached {counts}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
