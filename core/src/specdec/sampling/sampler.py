"""From processed logits to one token per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.sampling import noise
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT

if TYPE_CHECKING:
    from specdec.sampling.batch import RowLayout, SamplingBatch
    from specdec.types import Rows


def sample(logits: Tensor, rows: RowLayout | Rows, batch: SamplingBatch, purpose: int = noise.Purpose.SAMPLE) -> Tensor:
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
    if logits.device.type == "cpu":
        return _choose_on_cpu(
            logits, rows.request_index.numpy(), batch.temperature, batch.seeds, rows.positions, int(purpose)
        )
    return choose_anywhere(logits, rows, batch, purpose)


def draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, purpose: int = noise.Purpose.SAMPLE
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
    if logits.device.type == "cpu":
        return _choose_on_cpu(logits, np.arange(logits.shape[0]), temperature, seeds, positions, int(purpose))
    return _draw_anywhere(logits, temperature, seeds, positions, purpose)


def choose_anywhere(
    logits: Tensor, rows: RowLayout | Rows, batch: SamplingBatch, purpose: int = noise.Purpose.SAMPLE
) -> Tensor:
    """What `sample` does, in plain torch: the reference, and the path of devices other than CPUs."""
    temperature = batch.temperature[rows.request_index]
    return _draw_anywhere(
        logits, temperature, batch.seeds[rows.request_index], rows.positions, purpose, all_greedy=batch.all_greedy
    )


def _draw_anywhere(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, purpose: int, *, all_greedy: bool = False
) -> Tensor:
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    fault = best.isnan()
    if not all_greedy:
        random = temperature > 0
        drawn, score = noise.race(logits, temperature.where(random, 1.0), seeds, positions, purpose)
        tokens = torch.where(random, drawn, tokens)
        fault |= random & (score.isnan() | (score == torch.inf))
    tokens = tokens.masked_fill(best == -torch.inf, NO_TOKEN_LEFT)
    return tokens.masked_fill(fault, NAN_LOGITS)


def _choose_on_cpu(
    logits: Tensor, request_index: np.ndarray, temperature: Tensor, seeds: Tensor, positions: Tensor, purpose: int
) -> Tensor:
    from specdec.sampling.cpu.choose import choose_tokens

    if logits.dtype == torch.bfloat16:
        values = logits.contiguous().view(torch.uint16).numpy()
    else:
        values = logits.float().contiguous().numpy()
    out = np.empty(len(values), dtype=np.int64)
    choose_tokens(
        values,
        request_index,
        temperature.contiguous().numpy(),
        seeds.contiguous().numpy(),
        positions.contiguous().numpy(),
        np.uint32(purpose),
        out,
    )
    return torch.from_numpy(out)


def warm_up(device: torch.device | str) -> None:
    """Compile (or load from its cache) what `sample` and the pipeline use on ``device``, before the first request."""
    if torch.device(device).type == "cpu":
        from specdec.sampling.cpu import choose, penalize, truncate  # noqa: F401
