"""MLP speculator (Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators").

A state starts as the target's final hidden state and takes in one token a step; each step has its own projection to
the vocabulary (shared when tied).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_train.batches import Batch
from specdec_train.heads.base import TrainableHead
from specdec_train.targets import FrozenTarget


class ScaleNorm(nn.Module):
    """RMS norm with weight and bias, without subtracting the mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return functional.rms_norm(x, (x.shape[-1],), None, 1e-6) * self.weight + self.bias


class MLPSpeculator(TrainableHead):
    """The trainable speculator with tied embedding, norm and projection."""

    name = "mlp_speculator"
    reduces_vocabulary = False

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        inner, width = config["inner_dim"], config["emb_dim"]
        self.num_steps = config["n_predict"]
        self.emb = nn.Embedding(config["vocab_size"], inner)
        self.first = nn.Linear(width, inner, bias=False)
        self.later = nn.Linear(inner, inner, bias=False)
        self.norm = ScaleNorm(inner)
        self.head = nn.Linear(inner, config["vocab_size"], bias=False)
        self.state_weight = 0.5 ** (0.5 / self.num_steps)
        self.token_weight = math.sqrt(1 - self.state_weight**2) * math.sqrt(inner / 2)

    @classmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The layout of IBM's fms-extras, tied and with a scaled input."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": target_config.vocab_size,
            "emb_dim": target_config.hidden_size,
            "inner_dim": options.get("inner_dim", 0) or target_config.hidden_size,
            "n_predict": options["num_steps"],
            "top_k_tokens_per_head": [1] * options["num_steps"],
            "n_candidates": 1,
            "tie_weights": True,
            "scale_input": True,
        }

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, sample: Iterable[Batch]) -> None:
        """Start embedding and projection from the leading directions of the target's own."""
        inner = self.emb.embedding_dim
        _, _, basis = torch.linalg.svd(target.embedding[:: max(1, len(target.embedding) // 4096)], full_matrices=False)
        compressed = target.embedding @ basis[:inner].T
        self.emb.weight.copy_(compressed / compressed.std())
        self.head.weight.copy_(compressed)
        self.first.weight.copy_(basis[:inner])

    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """The state after each step, [B, S, inner]."""
        hidden = batch.hidden[..., -1, :]
        state = functional.rms_norm(hidden, (hidden.shape[-1],), None, 1e-6) / math.sqrt(2)
        outputs = []
        for step in range(num_steps):
            projected = self.first(state) if step == 0 else self.later(state)
            token = self.emb(batch.tokens_ahead(1 + step))
            state = functional.gelu(self.norm(self.state_weight * projected + self.token_weight * token))
            outputs.append(state)
        return outputs

    def rows(self, target: FrozenTarget) -> Tensor:
        """[V, inner]: the head's own, which are trained."""
        return self.head.weight

    def tensors(self) -> dict[str, Tensor]:
        """Names ``emb.0``, ``proj.0``, ``proj.1``, ``ln.0`` and ``head.0``, as tied checkpoints have them."""
        return {
            "emb.0.weight": self.emb.weight.detach(),
            "proj.0.weight": self.first.weight.detach(),
            "proj.1.weight": self.later.weight.detach(),
            "ln.0.weight": self.norm.weight.detach(),
            "ln.0.bias": self.norm.bias.detach(),
            "head.0.weight": self.head.weight.detach(),
        }

    @classmethod
    def published_name(cls, stored: str) -> str | None:
        """Names with and without their common beginning."""
        return stored.removeprefix("speculator.")
