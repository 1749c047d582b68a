"""Fast paths for CPUs, on torch's threads or the calling one.

Kernel modules, which import numba (see `specdec.cpu.library`): `accept`, `bitmask`, `bits`, `choose`, `exponential`,
`follow`, `keep`, `memory`, `penalize`, `rank`, `steps`, `truncate`, `weigh`.
"""

from specdec.cpu.library import Kernels

KERNELS = Kernels(
    *(
        f"specdec.sampling.cpu.{module}"
        for module in ("accept", "bitmask", "choose", "follow", "keep", "penalize", "rank", "truncate", "weigh")
    )
)
"""Draws, verification, and the stages of the logits pipeline."""
