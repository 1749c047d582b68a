"""The sampling backend `triton` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.sampling.backend import SamplingBackend


@hookimpl
def sampling_backend() -> SamplingBackend:
    """Build the backend; its kernels are compiled when they first run."""
    from specdec_kernels_triton.backend import TritonSampling

    return TritonSampling()
