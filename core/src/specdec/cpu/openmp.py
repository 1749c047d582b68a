"""torch's OpenMP runtime: where it is, how long its idle threads spin, and which thread owns them.

Imports neither torch nor numba, so that waiting can be limited before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_RUNTIMES = ("libgomp", "libomp", "libiomp")
_PAUSE_HARD = 2
"""``omp_pause_hard`` of OpenMP 5.0."""

WAIT_SETTINGS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a waiting thread spins before it sleeps: some hundred microseconds (libgomp), one millisecond (libomp)."""


def limit_waiting() -> None:
    """Let OpenMP threads that wait for work sleep soon; takes effect only before torch is loaded.

    By default they spin for milliseconds (libgomp: three by its own estimate, ten where it was measured; libomp: 200).
    On a machine that does nothing else this costs nothing. Where another process has taken a core, each of the
    hundreds of parallel operations of a forward pass waits until the spinning thread's time slice ends: with one busy
    neighbour on two cores, 120 linears took 930 ms instead of 10. With this limit they take tens of milliseconds
    there, and alone as little as before.

    A setting of the user's own stands.
    """
    own = ("OMP_WAIT_POLICY", *WAIT_SETTINGS)
    if "torch" not in sys.modules and not any(name in os.environ for name in own):
        os.environ.update(WAIT_SETTINGS)


def library_path() -> str | None:
    """The OpenMP runtime loaded into this process, torch's own if there are several; None when there is none."""
    if not _MAPS.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines() if ".so" in line}
    runtimes = sorted(path for path in loaded if Path(path).name.startswith(_RUNTIMES))
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    own = [path for path in runtimes if torch_file and path.startswith(str(Path(torch_file).parent))]
    return next(iter(own or runtimes), None)


def release_threads() -> None:
    """End the calling thread's OpenMP threads; they come back when it needs them.

    Each Python thread that runs parallel operations has OpenMP threads of its own. When there are more of them than
    cores, libgomp hardly lets idle ones spin at all, and every start of threads costs a wake-up: a step of a small
    model took a quarter longer. A thread that loads a model for another thread to run should call this when it is
    done.
    """
    path = library_path()
    pause = None if path is None else getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_PAUSE_HARD)
