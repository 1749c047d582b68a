"""MLP speculator (Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators").

A state starts as the target's final hidden state and takes in one token a step; each step has its own projection to
the vocabulary (shared when tied).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_train.batches import Batch, shifted
from specdec_train.heads.base import Sample, TrainableHead
from specdec_train.linear import LeastSquares
from specdec_train.targets import FrozenTarget

_PLACE, _SPREAD = 2.5, 0.5
"""Mean and root mean square of what the activation reads at first: gelu(x) is next to x where x > 1.5."""


def _entered(hidden: Tensor) -> Tensor:
    """Final hidden states as the first step reads them, [..., width]."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), None, 1e-6) / math.sqrt(2)


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
    def initialise(self, target: FrozenTarget, sample: Sample) -> None:
        """Start as the best linear guess of the target's next final hidden states that the inner dimension allows.

        Each step then says, in the directions in which the target's logits vary most, what its final hidden state will
        be. The norm's bias keeps the activation where it is next to the identity, and the mean of a state, where the
        bias would be seen, is not used.
        """
        self.norm.weight.fill_(_SPREAD)
        self.norm.bias.fill_(_PLACE)
        self._fit_later_steps(sample, self._fit_first_step(target, sample))

    def _fit_first_step(self, target: FrozenTarget, sample: Sample) -> Tensor:
        """Set the embedding, the first projection and the projection to the vocabulary.

        Returns:
            [inner, width]: what the sum under the norm should be for a final hidden state.
        """
        inner, width = self.first.weight.shape
        fit = LeastSquares(2 * width, width)
        for batch in sample():
            hidden, chosen = batch.hidden[..., -1, :], batch.answers(2)
            inputs = torch.cat([target.embed(batch.tokens_ahead(1)), _entered(hidden)], dim=-1)
            fit.add(inputs[chosen], shifted(hidden, hidden, 1)[chosen])
        rows = target.output_rows - target.output_rows.mean(dim=0)
        rank = min(inner - 1, width)
        restore, keep = fit.reduced(rank, rows.T @ rows)
        mixed = torch.linalg.qr(torch.cat([torch.ones(inner, 1), torch.randn(inner, rank)], dim=1))[0][:, 1:]
        directions = mixed @ keep
        from_token, from_state = (directions @ fit.solve()).split(width, dim=1)
        self.emb.weight.copy_(target.embedding @ from_token.T / self.token_weight)
        self.first.weight.copy_(from_state / self.state_weight)
        self.head.weight.copy_(target.output_rows @ restore @ mixed.T / _SPREAD)
        return directions

    def _fit_later_steps(self, sample: Sample, directions: Tensor) -> None:
        """Set the projection of states."""
        fit = LeastSquares(len(directions), len(directions))
        for batch in sample():
            hidden, chosen = batch.hidden[..., -1, :], batch.answers(3)
            before = self._mixed(self.first(_entered(hidden)), batch.tokens_ahead(1))[chosen]
            wanted = shifted(hidden, hidden, 2)[chosen] @ directions.T
            token = self.token_weight * self.emb(batch.tokens_ahead(2)[chosen])
            fit.add(self.state_weight * functional.gelu(self.norm(before)), wanted - token)
        self.later.weight.copy_(fit.solve())

    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """The state after each step, [B, S, inner]."""
        state, outputs = _entered(batch.hidden[..., -1, :]), []
        for step in range(num_steps):
            projected = self.first(state) if step == 0 else self.later(state)
            state = functional.gelu(self.norm(self._mixed(projected, batch.tokens_ahead(1 + step))))
            outputs.append(state)
        return outputs

    def _mixed(self, projected: Tensor, token_ids: Tensor) -> Tensor:
        """[..., inner], int64 [...] -> [..., inner]."""
        return self.state_weight * projected + self.token_weight * self.emb(token_ids)

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
