"""Medusa (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads").

Each head is a residual block on the target's final hidden state; head j predicts the token ``j + 2`` positions ahead.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_train.batches import Batch
from specdec_train.heads.base import Sample, TrainableHead
from specdec_train.targets import FrozenTarget


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return x + functional.silu(self.linear(x))


class Medusa(TrainableHead):
    """The trainable heads; all of them project with the target's own output rows."""

    name = "medusa"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config["hidden_size"]) for _ in range(config["num_hidden_layers"])))
            for _ in range(config["num_heads"])
        )

    @classmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The layout of vLLM's converted heads, which share one output projection."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target_config.hidden_size,
            "num_heads": options["num_steps"],
            "num_hidden_layers": options.get("num_layers", 1),
            "vocab_size": target_config.vocab_size,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, sample: Sample) -> None:
        """Start as the identity."""
        for parameter in self.parameters():
            parameter.zero_()

    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """One output a head, [B, S, width]."""
        hidden = batch.hidden[..., -1, :]
        return [block(hidden) for block in self.blocks[:num_steps]]

    def tensors(self) -> dict[str, Tensor]:
        """Names ``blocks.{head}.layers.{layer}.weight`` and ``.bias``."""
        return {
            f"blocks.{name.replace('.', '.layers.', 1).replace('.linear', '')}": weight
            for name, weight in self.blocks.state_dict().items()
        }

    @classmethod
    def published_name(cls, stored: str) -> str | None:
        """Also the authors' names of the blocks."""
        return re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", stored.removeprefix("medusa_heads."))
