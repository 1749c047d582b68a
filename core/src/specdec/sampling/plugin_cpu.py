"""The built-in sampling backend `cpu` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.sampling.backend import SamplingBackend


@hookimpl
def sampling_backend() -> SamplingBackend:
    """Build the backend: compiled CPU kernels."""
    from specdec.sampling.cpu.backend import CpuSampling

    return CpuSampling()
