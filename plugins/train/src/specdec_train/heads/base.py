"""What the training loop asks of a head."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from specdec_train.batches import Batch
from specdec_train.targets import FrozenTarget


class TrainableHead(nn.Module):
    """A head whose row i, at draft step j, predicts token ``i + 2 + j`` of a sequence.

    The projection to the draft vocabulary is made of the target's own output rows unless `project` is overridden.
    """

    name: ClassVar[str]
    """The method the trained head serves."""
    reduces_vocabulary: ClassVar[bool] = True
    """Whether the published layout can draft from a part of the target's vocabulary."""
    reads_layers: ClassVar[bool] = False
    """Whether the head reads tapped layers, which its configuration then names."""

    @classmethod
    @abstractmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The head's ``config.json`` for a target: sizes as the published layout names them."""

    @abstractmethod
    def initialise(self, target: FrozenTarget) -> None:
        """Set the weights that training starts from."""

    @abstractmethod
    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """What each draft step projects to logits: ``num_steps`` tensors [B, S, width]."""

    def project(self, output: Tensor, step: int, target: FrozenTarget) -> Tensor:
        """Rows of an output of step ``step``, [N, width] -> [N, draft vocabulary]."""
        return target.logits(output)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the published layout."""
