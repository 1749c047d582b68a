"""The built-in sampling backend `torch` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.sampling.backend import SamplingBackend


@hookimpl
def sampling_backend() -> SamplingBackend:
    """Build the backend: plain torch, for any device."""
    from specdec.sampling.torch_backend import TorchSampling

    return TorchSampling()
