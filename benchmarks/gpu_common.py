"""What the GPU benchmarks share: which device, timing, tables."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def parse(description: str | None) -> argparse.Namespace:
    """The options; sets up Triton's interpreter for a dry run, so call it before triton is imported."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="result file; benchmarks/results/NAME.json when not given")
    parser.add_argument("--seconds", type=float, default=270.0, help="start no further case after this (%(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU in Triton's interpreter: checks the script alone"
    )
    arguments = parser.parse_args()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    return arguments


def device_or_exit(arguments: argparse.Namespace) -> str:
    """'cuda', or 'cpu' for a dry run; ends the program where there is no GPU."""
    import torch

    if arguments.dry_run:
        return "cpu"
    if not torch.cuda.is_available():
        sys.exit(
            f"{os.path.basename(sys.argv[0])} measures a GPU, and torch {torch.__version__} finds none "
            "(torch.cuda.is_available() is False). Run it on a machine with an NVIDIA or AMD GPU and a torch built for "
            "it; --dry-run only checks the script."
        )
    return "cuda"


def microseconds(run: Callable[[], Any], device: str) -> float:
    """Median time of a call."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=40, return_mode="median")) * 1e3


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    cells = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.1f}" if cell >= 1 else f"{cell:.2g}"
    return str(cell)


def gpu() -> dict[str, Any]:
    """The device and the versions that matter."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (dry run)"
    return {"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
