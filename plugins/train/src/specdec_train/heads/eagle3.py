"""EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test").

One decoder layer reads the embedding of the next token beside a fusion of three hidden states of the target; deeper
draft steps read the layer's own output in place of the fusion. Training runs those steps as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_train.batches import Batch
from specdec_train.heads.base import Sample, TrainableHead
from specdec_train.heads.copying import start_copying
from specdec_train.layers import DraftAttention, GatedMLP, RMSNorm, decoder_layer_shape
from specdec_train.targets import FrozenTarget


class Eagle3Layer(nn.Module):
    """The decoder layer; queries, keys and values read twice the width."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = DraftAttention(
            2 * width,
            width,
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["rope_theta"],
        )
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config["intermediate_size"])

    def forward(self, embedded: Tensor, feature: Tensor, step: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, S, width] twice -> [B, S, width]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)
        out = feature + self.self_attn(both, step, earlier)
        return out + self.mlp(self.post_attention_layernorm(out))


class Eagle3(TrainableHead):
    """The trainable head; the projection to the draft vocabulary is the target's own and stays as it is."""

    name = "eagle3"
    own_sizes = ("num_attention_heads", "num_key_value_heads")
    reads_layers = True
    num_features = 3

    @classmethod
    def shape(cls, target_config: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The layout of SpecForge, SGLang and vLLM (`LlamaForCausalLMEagle3`)."""
        return {"architectures": ["LlamaForCausalLMEagle3"], **decoder_layer_shape(target_config)}

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = nn.Linear(self.num_features * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(width, config["rms_norm_eps"])

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, sample: Sample) -> None:
        """Start from the target's last decoder layer, reading the last of the three features, and with heads that copy.

        Queries, keys and values see the embedding through small random weights at first.
        """
        layer, width = target.last_layer, self.fc.out_features
        self.fc.weight.zero_()
        self.fc.weight[:, -width:] = torch.eye(width)
        self.fc.weight.add_(torch.randn_like(self.fc.weight) * 0.01)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(self.midlayer.self_attn, name).weight
            weight[:, width:] = layer[f"self_attn.{name}.weight"]
            weight[:, :width] = torch.randn_like(weight[:, :width]) * 0.02
        self.midlayer.self_attn.o_proj.weight.copy_(layer["self_attn.o_proj.weight"])
        self.midlayer.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        self.midlayer.post_attention_layernorm.weight.copy_(layer["post_attention_layernorm.weight"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.midlayer.mlp, name).weight.copy_(layer[f"mlp.{name}.weight"])
        self.norm.weight.copy_(target.final_norm)
        start_copying(self, target, sample)

    def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[Tensor]:
        """Normalised outputs of each draft step, [B, S, width]; row i of step j predicts token ``i + 2 + j``."""
        feature = self.fc(batch.hidden[..., : self.num_features, :].flatten(-2))
        earlier: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(num_steps):
            feature = self.midlayer(target.embed(batch.tokens_ahead(1 + step)), feature, step, earlier)
            outputs.append(self.norm(feature))
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """Names as the EAGLE authors write them; `lm_head` is absent, so the target's rows are used."""
        return dict(self.state_dict())

    @classmethod
    def published_name(cls, stored: str) -> str | None:
        """Also the names of the ``speculators`` library."""
        name = super().published_name(stored)
        return name.replace("layers.0.", "midlayer.", 1) if name and name.startswith("layers.0.") else name
