"""What the training loop asks of a head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdec_train.batches import Batch
from specdec_train.targets import FrozenTarget

Sample = Callable[[], Iterator[Batch]]
"""Makes a pass over some of the answers to train on."""


class TrainableHead(nn.Module):
    """A head whose row i, at draft step j, predicts token ``i + 2 + j`` of a sequence.

    The projection to the draft vocabulary is made of `output_rows` or of the target's, unless `rows` is overridden.
    """

    name: ClassVar[str]
    """The method the trained head serves."""
    reduces_vocabulary: ClassVar[bool] = True
    """Whether the published layout can draft from a part of the target's vocabulary."""
    reads_layers: ClassVar[bool] = False
    """Whether the head reads tapped layers, which its configuration then names."""
    own_sizes: ClassVar[tuple[str, ...]] = ()
    """Entries of `shape` that a head to start from may have otherwise: training goes on with its own."""
    cross_entropy_weight: ClassVar[float] = 1.0
    """Weight in the loss of the cross entropy between the target's law and the head's."""
    regression_weight: ClassVar[float] = 0.0
    """Weight in the loss of the Smooth-L1 distance of the outputs from the target's final hidden states, for a head
    that predicts those."""
    output_rows: Tensor | None = None
    """[draft vocabulary, width]: an output linear of its own, which is kept as it is; None: the target's rows."""

    @classmethod
    @abstractmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The head's ``config.json`` for a target: sizes as the published layout names them."""

    @abstractmethod
    def initialise(self, target: FrozenTarget, sample: Sample) -> None:
        """Set the weights that training starts from.

        Args:
            target: the target's weights.
            sample: answers to look at.
        """

    @abstractmethod
    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """What each draft step projects to logits: ``num_steps`` tensors [B, S, width]."""

    def rows(self, target: FrozenTarget) -> Tensor:
        """[draft vocabulary, width]: what the outputs of all steps are multiplied with for the logits."""
        if self.output_rows is None:
            return target.output_rows
        return self.output_rows.to(target.output_rows.device, torch.float32)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the published layout."""

    @classmethod
    def published_name(cls, stored: str) -> str | None:
        """The name in `tensors` for a tensor of a published checkpoint; None for what is no part of the head."""
        name = stored.removeprefix("model.")
        return None if ".rotary_emb." in name else name
