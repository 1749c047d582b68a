"""EAGLE (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty").

One decoder layer predicts the target's next final hidden state from the one before and the embedding of the next token.
Deeper steps read the layer's own output; they are trained too (as in HASS, Zhang et al. 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_train.batches import Batch, shifted
from specdec_train.heads.base import Sample, TrainableHead
from specdec_train.layers import DraftAttention, GatedMLP, RMSNorm, decoder_layer_shape
from specdec_train.linear import LeastSquares
from specdec_train.targets import FrozenTarget


class EagleLayer(nn.Module):
    """A llama decoder layer without its first norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.self_attn = DraftAttention(
            width,
            width,
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["rope_theta"],
        )
        self.post_attention_layernorm = RMSNorm(width, config["rms_norm_eps"])
        self.mlp = GatedMLP(width, config["intermediate_size"])

    @torch.no_grad()
    def start_from(self, target: FrozenTarget) -> None:
        """Take over the target's last layer, but add nothing yet.

        That layer reads normalised streams; here it reads guesses of final hidden states, which are normalised streams
        times the weights of the target's final norm. So those are divided out of what reads: attention has no norm
        here. What the layer adds has another scale, too, and its two output projections start at zero.
        """
        layer = target.last_layer
        for name in ("q_proj", "k_proj", "v_proj"):
            reads = layer["input_layernorm.weight"] / target.final_norm
            getattr(self.self_attn, name).weight.copy_(layer[f"self_attn.{name}.weight"] * reads)
        scale = target.final_norm.square().mean().sqrt()
        reads = layer["post_attention_layernorm.weight"] / target.final_norm
        self.post_attention_layernorm.weight.copy_(reads * scale)
        for name in ("gate_proj", "up_proj"):
            getattr(self.mlp, name).weight.copy_(layer[f"mlp.{name}.weight"])
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    def forward(self, x: Tensor, step: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, S, width] -> [B, S, width]."""
        x = x + self.self_attn(x, step, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


def next_state_map(target: FrozenTarget, sample: Sample) -> Tensor:
    """The linear map from a token's embedding beside the final hidden state before it to the final hidden state at it.

    Args:
        target: for the embeddings.
        sample: answers to look at.

    Returns:
        [width, 2 * width].
    """
    width = target.final_norm.shape[0]
    fit = LeastSquares(2 * width, width)
    for batch in sample():
        states = batch.hidden[..., -1, :]
        has_next = torch.arange(states.shape[1]) + 1 < batch.lengths[:, None]
        inputs = torch.cat([target.embed(batch.tokens_ahead(1)), states], dim=-1)
        fit.add(inputs[has_next], shifted(states, states, 1)[has_next])
    return fit.solve()


class Eagle(TrainableHead):
    """The trainable head; embedding and output projection are the target's."""

    name = "eagle"
    cross_entropy_weight = 0.1
    regression_weight = 1.0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])

    @classmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The layout of the EAGLE authors."""
        return {"architectures": ["EagleLlamaForCausalLM"], "bias": False, **decoder_layer_shape(target_config)}

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, sample: Sample) -> None:
        """Start as the best linear guess, with the target's last decoder layer for what is to be learned beyond it."""
        self.fc.weight.copy_(next_state_map(target, sample))
        self.first_layer.start_from(target)

    @property
    def first_layer(self) -> EagleLayer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """Predicted final hidden states of each draft step, [B, S, width]."""
        feature = batch.hidden[..., -1, :]
        earlier: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(num_steps):
            joined = torch.cat([target.embed(batch.tokens_ahead(1 + step)), feature], dim=-1)
            feature = self.first_layer(self.fc(joined), step, earlier)
            outputs.append(feature)
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """Names as the EAGLE authors write them; the embedding is the target's and is left out."""
        return dict(self.state_dict())
