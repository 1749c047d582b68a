"""Runs the logits processors of plugins as stages of the logits pipeline, and contains their faults."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from specdec.errors import InvalidRequestError, RequestFailedError, SpecdecError
from specdec.sampling.processor import LogitsProcessor, ProcessorRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.sampling.batch import SamplingBatch
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.rows import StepRows

logger = logging.getLogger(__name__)


@frozen(eq=False)
class NamedProcessor:
    """A processor, and the plugin it came from for messages."""

    processor: LogitsProcessor
    label: str
    """Kind, name, distribution and version."""

    def check(self, params: SamplingParams) -> None:
        """Let the processor look at a request's parameters.

        Raises:
            InvalidRequestError: it refuses them, or fails on them.
        """
        try:
            self.processor.check(params)
        except (SpecdecError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InvalidRequestError(
                f"the {self.label} failed on the request's parameters: {type(error).__name__}: {error}"
            ) from error


class CustomStage:
    """One processor of a plugin."""

    def __init__(self, named: NamedProcessor, faults: dict[str, Exception]) -> None:
        """Make the stage.

        Args:
            named: the processor.
            faults: where requests that it fails are noted, by id.
        """
        self._processor = named.processor
        self._label = named.label
        self._faults = faults
        self._logged = False
        self._batch: SamplingBatch | None = None
        self._indices: tuple[int, ...] = ()

    def indices(self, batch: SamplingBatch) -> tuple[int, ...]:
        """The requests it applies to; asked once for a set of running requests."""
        if batch is not self._batch:
            self._batch = batch
            self._indices = tuple(r for r in range(len(batch.requests)) if self._applies(batch, r))
        return self._indices

    def name_for(self, params: SamplingParams) -> str | None:
        """What to call the processor in a message about a request with these parameters; None if it leaves it alone."""
        try:
            return self._label if self._processor.applies(params) else None
        except Exception:
            return None

    def _applies(self, batch: SamplingBatch, r: int) -> bool:
        request = batch.requests[r]
        try:
            return bool(self._processor.applies(request.params))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note("applies", [request.request_id], error)
            return False

    def apply(self, logits: Tensor, step: StepRows) -> None:
        """Change ``logits`` [R, V] float32 in place; requests that the processor fails get rows of NaN."""
        everyone = len(self._indices) == len(step.batch.requests)
        index = None if everyone else torch.from_numpy(step.rows_of_all(self._indices)).to(logits.device)
        own = logits if index is None else logits[index]
        try:
            self._processor.process(own, ProcessorRows(step, self._indices))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note("process", [step.batch.requests[r].request_id for r in self._indices], error)
            own.fill_(torch.nan)
        if index is not None:
            logits[index] = own

    def forget(self, request_id: str) -> None:
        """The request ended."""
        if self._batch is not None and any(r.request_id == request_id for r in self._batch.requests):
            self._batch, self._indices = None, ()
        try:
            self._processor.forget(request_id)
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("forget() of the %s raised", self._label)

    def _note(self, method: str, request_ids: Sequence[str], error: BaseException) -> None:
        text = f"The {self._label} raised {type(error).__name__} in {method}(): {error}"
        for request_id in request_ids:
            fault = RequestFailedError(text)
            fault.__cause__ = error
            self._faults[request_id] = fault
        if not self._logged:
            self._logged = True
            logger.error("%s; requests that use it fail", text, exc_info=error)
