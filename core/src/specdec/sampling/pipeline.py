"""From raw to processed logits: one path for the rows of plain decoding, chains and trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.sampling.custom import CustomStage, NamedProcessor
from specdec.sampling.grammar_mask import GrammarMask
from specdec.sampling.masks import BadWords, MinTokens, TokenBias
from specdec.sampling.penalties import Penalties
from specdec.sampling.rows import LogitsStage, StepRows
from specdec.sampling.truncation import Truncation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.sampling.batch import RowLayout, SamplingBatch
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.rows import HostDraft
    from specdec.types import Draft


class LogitsPipeline:
    """Applies the requests' options to logits rows, in a fixed order.

    logits processors of plugins; allowed ids and logit bias, bad words, grammar, min tokens; penalties; then, at the
    request's temperature, min-p, top-k, top-p.
    (The second group only adds to logits or masks them, so its order matters only where a grammar is at its end: there
    min tokens gives way. It comes after the processors, so that a grammar holds whatever a processor does.)

    Row i of a request is processed exactly as if the draft tokens before it had been emitted. Processed logits are
    **not** divided by the temperature: the law of a row is ``softmax(logits / temperature)``, and at temperature 0 the
    argmax.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, processors: Sequence[NamedProcessor] = ()) -> None:
        """Make the stages.

        Args:
            vocab_size: width of the logits.
            device: where they are.
            processors: those of plugins, in the order in which they run.
        """
        device = torch.device(device)
        self.faults: dict[str, Exception] = {}
        """Why requests whose rows were set to NaN cannot go on, by request id."""
        self._grammar = GrammarMask(device, vocab_size, self.faults)
        self._stages: tuple[LogitsStage, ...] = (
            *(CustomStage(named, self.faults) for named in processors),
            TokenBias(device),
            BadWords(device, vocab_size),
            self._grammar,
            MinTokens(device, vocab_size),
            Penalties(device, vocab_size),
            Truncation(),
        )

    @property
    def grammar_seconds(self) -> float:
        """Time spent on grammar masks so far."""
        return self._grammar.seconds

    def process(
        self,
        logits: Tensor,
        layout: RowLayout,
        draft: Draft,
        batch: SamplingBatch,
        drafts: Sequence[HostDraft] | None = None,
    ) -> Tensor:
        """Process the rows of a step.

        Args:
            logits: [R, V] raw, in any float dtype; not changed.
            layout: which request and position each row has.
            draft: the draft tokens scored in this step.
            batch: the requests, in the order of ``layout``.
            drafts: ``draft`` per request on the host, when it is there already.

        Returns:
            ``logits`` itself when no request uses any option but the temperature, otherwise a new float32 [R, V].
        """
        stages = [stage for stage in self._stages if stage.indices(batch)]
        if not stages:
            return logits
        step = StepRows(layout, draft, batch, drafts)
        processed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for stage in stages:
            stage.apply(processed, step)
        return processed

    def processors_of(self, params: SamplingParams) -> list[str]:
        """What to call the plugins' processors that apply to a request with these parameters."""
        names = [stage.name_for(params) for stage in self._stages if isinstance(stage, CustomStage)]
        return [name for name in names if name is not None]

    def forget(self, request_id: str) -> None:
        """A request ended: drop what is kept for it."""
        for stage in self._stages:
            stage.forget(request_id)
        self.faults.pop(request_id, None)
