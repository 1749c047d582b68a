"""From processed logits to one token per row, on whatever device they are.

The work is done by the device's sampling backend (`specdec.sampling.backend`). An engine selects it through the
registry when it starts (`use_backend`); until then a device has the built-in one. Backends give the same tokens, so the
choice, which holds for all engines of a process, is one of speed alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.noise import Purpose

if TYPE_CHECKING:
    from specdec.sampling.backend import SamplingBackend
    from specdec.sampling.batch import RowLayout, SamplingBatch
    from specdec.types import Rows

_backends: dict[str, SamplingBackend] = {}


def use_backend(device: str, backend: SamplingBackend) -> None:
    """Let ``backend`` serve a device type from now on."""
    _backends[device] = backend


def backend_of(device: str) -> SamplingBackend:
    """The sampling backend of a device type."""
    backend = _backends.get(device)
    if backend is None:
        backend = _backends.setdefault(device, _built_in(device))
    return backend


def _built_in(device: str) -> SamplingBackend:
    from specdec.sampling.torch_backend import TorchSampling

    if device != "cpu":
        return TorchSampling()
    from specdec.sampling.cpu.backend import CpuSampling

    return CpuSampling()


def sample(logits: Tensor, rows: RowLayout | Rows, batch: SamplingBatch, purpose: int = Purpose.SAMPLE) -> Tensor:
    """Choose the token of every row: a pure function of its logits and of the request's seed and the row's position.

    Rows of requests at temperature 0 take the first index of the largest logit; the others draw from
    ``softmax(logits / temperature)`` with the keyed noise of `specdec.sampling.noise`.

    Args:
        logits: [R, V] in float32 or the model's dtype, as `LogitsPipeline.process` returns them.
        rows: which request and position each row has.
        batch: the requests' temperatures and seeds.
        purpose: the noise stream.

    Returns:
        int64 [R] on the device of ``logits``; token ids, or the codes of `specdec.sampling.outcome` for rows with NaN
        or without any token left. There is no host synchronisation.
    """
    of_row = rows.request_index
    return draw(logits, batch.temperature[of_row], batch.seeds[of_row], rows.positions, purpose)


def draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, purpose: int = Purpose.SAMPLE
) -> Tensor:
    """What `sample` does, with the parameters given by row; for callers without requests, such as proposers.

    Args:
        logits: [R, V], any float dtype.
        temperature: float32 [R]; 0 for the largest logit.
        seeds: int64 [R].
        positions: int64 [R].
        purpose: the noise stream.

    Returns:
        int64 [R], as `sample`.
    """
    return backend_of(logits.device.type).draw(logits, temperature, seeds, positions, purpose)


def warm_up(device: torch.device | str) -> None:
    """Compile (or load from its cache) what `sample` and the pipeline use on ``device``, before the first request."""
    backend_of(torch.device(device).type).warm_up()
