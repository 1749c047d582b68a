"""`structured_outputs`: forbid what a grammar does not allow, in each row behind the tokens drafted before it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.errors import RequestFailedError
from specdec.grammar.state import ALL_TOKENS, bitmask_width

if TYPE_CHECKING:
    from specdec.sampling.batch import SampledRequest, SamplingBatch
    from specdec.sampling.rows import StepRows


class GrammarMask:
    """Fills a packed mask per row on the host, and applies all of them in one call.

    The host does its part while a device still computes the logits: nothing here waits for the device.
    """

    def __init__(self, device: torch.device, vocab_size: int, faults: dict[str, Exception]) -> None:
        """Make the stage.

        Args:
            device: where the logits are.
            vocab_size: their width.
            faults: where requests whose grammar fails are noted, by id.
        """
        self.seconds = 0.0
        """Time spent filling and applying masks since the engine started."""
        self._device = device
        self._width = bitmask_width(vocab_size)
        self._vocab_size = vocab_size
        self._faults = faults

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests this stage has work for."""
        return batch.constrained

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place."""
        begin = time.perf_counter()
        constrained = step.batch.constrained
        rows = step.rows_of_all(constrained)
        masks = np.empty((len(rows), self._width), dtype=np.int32)
        failed = []
        start = 0
        for r in constrained:
            own = step.rows_of(r)
            end = start + own.stop - own.start
            if not self._fill(step, r, masks[start:end]):
                failed.append(own)
            start = end
        self._apply(logits, rows, masks)
        for own in failed:
            logits[own] = torch.nan
        self.seconds += time.perf_counter() - begin

    def _fill(self, step: StepRows, r: int, masks: np.ndarray) -> bool:
        """Write the masks of one request's rows; False when its grammar raised."""
        request = step.batch.requests[r]
        grammar = request.grammar
        assert grammar is not None
        tokens, parents = step.draft_of(r)
        try:
            grammar.fill(tokens, parents, masks)
            if request.params.min_tokens:
                step.only_ends[step.rows_of(r)] = grammar.only_ends(masks)
            return True
        except Exception as error:
            self._faults[request.request_id] = _fault(request, error)
            masks[:] = ALL_TOKENS
            return False

    def _apply(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        if logits.device.type == "cpu":
            from specdec.sampling.cpu import KERNELS

            KERNELS.function("apply_bitmask")(logits.numpy(), rows, masks)
        else:
            apply_bitmask_anywhere(logits, rows, masks)

    def forget(self, request_id: str) -> None:
        """The request ended; its state ends with it."""


def apply_bitmask_anywhere(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """What `specdec.sampling.cpu.bitmask.apply_bitmask` does, in plain torch."""
    index = torch.from_numpy(rows).to(logits.device, non_blocking=True)
    packed = torch.from_numpy(masks).to(logits.device, non_blocking=True)
    place = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((packed[:, :, None] >> place) & 1).flatten(1)[:, : logits.shape[1]]
    logits[index] = logits[index].masked_fill(allowed == 0, -torch.inf)


def _fault(request: SampledRequest, error: Exception) -> Exception:
    if isinstance(error, RequestFailedError):
        return error
    return RequestFailedError(f"its grammar raised {type(error).__name__}: {error}")
