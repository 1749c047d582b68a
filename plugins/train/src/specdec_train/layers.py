"""The parts that trained heads share: RMSNorm, rotary positions, a gated MLP and attention over a simulated draft.

Written for training: everything is differentiable and runs over whole sequences at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def decoder_layer_shape(target_config: Any) -> dict[str, Any]:
    """The ``config.json`` entries of a draft layer that is as wide as a llama-like target's own layers."""
    return {
        "model_type": "llama",
        "hidden_size": target_config.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "num_attention_heads": target_config.num_attention_heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": getattr(target_config, "head_dim", None)
        or target_config.hidden_size // target_config.num_attention_heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": target_config.max_position_embeddings,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": target_config.rope_parameters["rope_theta"],
        "hidden_act": "silu",
        "vocab_size": target_config.vocab_size,
        "tie_word_embeddings": False,
    }


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding in llama's layout (halves of a head are rotated against each other).

    Args:
        x: [B, heads, S, head_dim].
        positions: int64 [S].
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.to(torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DraftAttention(nn.Module):
    """Attention of one draft layer over a simulated draft ("training-time test", Li et al., EAGLE-3, 2025).

    Row i of step j stands for the j-th draft token after true row i. It attends to the true rows up to i and to the
    rows i of the steps 1 .. j, which is what the cache holds when j tokens are drafted one after another.
    """

    def __init__(
        self, in_width: int, width: int, num_heads: int, num_kv_heads: int, head_dim: int, theta: float
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.theta = num_heads, num_kv_heads, head_dim, theta
        self.q_proj = nn.Linear(in_width, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, step: int, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend as step ``step``; keys and values of the step are appended to ``earlier``.

        Args:
            x: [B, S, in_width].
            step: 0 for the true rows.
            earlier: keys and values of the steps before, each [B, heads, S, head_dim].

        Returns:
            [B, S, width].
        """
        batch, length, _ = x.shape
        positions = torch.arange(step, step + length, device=x.device)
        queries = rotate(self._heads(self.q_proj(x), self.num_heads), positions, self.theta)
        keys = rotate(self._heads(self.k_proj(x), self.num_kv_heads), positions, self.theta)
        values = self._heads(self.v_proj(x), self.num_kv_heads)
        group = self.num_heads // self.num_kv_heads
        earlier.append((keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)))
        if step == 0:
            mixed = functional.scaled_dot_product_attention(queries, *earlier[0], is_causal=True)
        else:
            mixed = self._over_draft(queries * self.head_dim**-0.5, earlier)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _over_draft(queries: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        true_keys, true_values = earlier[0]
        length = queries.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
        scores = [(queries @ true_keys.transpose(-1, -2)).masked_fill(hidden, float("-inf"))]
        scores += [(queries * keys).sum(-1, keepdim=True) for keys, _ in earlier[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        mixed = weights[..., :length] @ true_values
        for i, (_, values) in enumerate(earlier[1:]):
            mixed = mixed + weights[..., length + i, None] * values
        return mixed
