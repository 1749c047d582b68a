"""From raw to processed logits: one path for the rows of plain decoding, chains and trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.masks import BadWords, MinTokens, TokenBias
from specdec.sampling.penalties import Penalties
from specdec.sampling.rows import LogitsStage, StepRows
from specdec.sampling.truncation import Truncation

if TYPE_CHECKING:
    from specdec.sampling.batch import RowLayout, SamplingBatch
    from specdec.types import Draft


class LogitsPipeline:
    """Applies the requests' options to logits rows, in a fixed order.

    allowed ids and logit bias, bad words, min tokens; penalties; then, at the request's temperature, min-p, top-k,
    top-p.
    (The first three only add to logits or mask them, so their order among themselves does not matter.)

    Row i of a request is processed exactly as if the draft tokens before it had been emitted. Processed logits are
    **not** divided by the temperature: the law of a row is ``softmax(logits / temperature)``, and at temperature 0 the
    argmax.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        self._stages: tuple[LogitsStage, ...] = (
            TokenBias(device),
            BadWords(device, vocab_size),
            MinTokens(device, vocab_size),
            Penalties(device, vocab_size),
            Truncation(),
        )

    def process(self, logits: Tensor, layout: RowLayout, draft: Draft, batch: SamplingBatch) -> Tensor:
        """Process the rows of a step.

        Args:
            logits: [R, V] raw, in any float dtype; not changed.
            layout: which request and position each row has.
            draft: the draft tokens scored in this step.
            batch: the requests, in the order of ``layout``.

        Returns:
            ``logits`` itself when no request uses any option but the temperature, otherwise a new float32 [R, V].
        """
        stages = [stage for stage in self._stages if stage.indices(batch)]
        if not stages:
            return logits
        step = StepRows(layout, draft, batch)
        processed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for stage in stages:
            stage.apply(processed, step)
        return processed

    def forget(self, request_id: str) -> None:
        """A request ended: drop what is kept for it."""
        for stage in self._stages:
            stage.forget(request_id)
