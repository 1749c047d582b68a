"""What loaders of draft heads have in common: sizes, checks against the target, vocabulary, Llama-like layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.drafting.checkpoint import check_target
from specdec.drafting.layers import ACTIVATIONS, LlamaLayer, LlamaWeights
from specdec.drafting.modules import embedding, linear, rms_norm, target_embedding, target_output, target_output_rows
from specdec.drafting.recurrent import Vocabulary
from specdec.drafting.vocabulary import target_ids_of
from specdec.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from specdec.drafting.checkpoint import HeadCheckpoint, Shape
    from specdec.target.model import TargetModel

DEFAULT_EPS = 1e-6
"""Of norms, where the configuration does not say (as transformers' LlamaConfig)."""


@frozen(kw_only=True)
class LlamaSizes:
    """Widths of Llama-like layers, with transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str

    @staticmethod
    def of(checkpoint: HeadCheckpoint) -> LlamaSizes:
        """Read them from a configuration.

        Raises:
            ModelLoadError: a key is missing or the activation is unknown.
        """
        config, require = checkpoint.config, checkpoint.require
        hidden_size, heads = int(require("hidden_size")), int(require("num_attention_heads"))
        activation = str(config.get("hidden_act") or "silu")
        if activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"{checkpoint.directory}: hidden_act is {activation!r}, heads know {', '.join(ACTIVATIONS)}"
            )
        return LlamaSizes(
            hidden_size=hidden_size,
            intermediate_size=int(require("intermediate_size")),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden_size // heads),
            rms_norm_eps=float(config.get("rms_norm_eps") or DEFAULT_EPS),
            hidden_act=activation,
        )

    def shapes(self, prefix: str, input_width: int | None = None, mlp: str = "mlp") -> dict[str, Shape]:
        """Names and shapes of a layer's required tensors, without its input norm.

        Args:
            prefix: ``layers.0`` and so on.
            input_width: of query, key and value; None: the hidden size.
            mlp: name of the feed-forward part.
        """
        h, wide = self.hidden_size, input_width or self.hidden_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            f"{prefix}.self_attn.q_proj.weight": (queries, wide),
            f"{prefix}.self_attn.k_proj.weight": (keys, wide),
            f"{prefix}.self_attn.v_proj.weight": (keys, wide),
            f"{prefix}.self_attn.o_proj.weight": (h, queries),
            f"{prefix}.{mlp}.gate_proj.weight": (self.intermediate_size, h),
            f"{prefix}.{mlp}.up_proj.weight": (self.intermediate_size, h),
            f"{prefix}.{mlp}.down_proj.weight": (h, self.intermediate_size),
            f"{prefix}.post_attention_layernorm.weight": (h,),
        }

    def optional_shapes(self, prefix: str) -> dict[str, Shape]:
        """Names and shapes of tensors that a layer may have: biases, norms of query and key heads."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = f"{prefix}.self_attn"
        return {
            f"{attention}.q_proj.bias": (queries,),
            f"{attention}.k_proj.bias": (keys,),
            f"{attention}.v_proj.bias": (keys,),
            f"{attention}.o_proj.bias": (self.hidden_size,),
            f"{attention}.q_norm.weight": (self.head_dim,),
            f"{attention}.k_norm.weight": (self.head_dim,),
        }

    def weights(self, tensors: Mapping[str, Tensor], prefix: str, mlp: str = "mlp") -> LlamaWeights:
        """The weights of a layer, from tensors of these names."""
        attention = f"{prefix}.self_attn"
        return LlamaWeights(
            query=tensors[f"{attention}.q_proj.weight"],
            key=tensors[f"{attention}.k_proj.weight"],
            value=tensors[f"{attention}.v_proj.weight"],
            output=tensors[f"{attention}.o_proj.weight"],
            query_bias=tensors.get(f"{attention}.q_proj.bias"),
            key_bias=tensors.get(f"{attention}.k_proj.bias"),
            value_bias=tensors.get(f"{attention}.v_proj.bias"),
            output_bias=tensors.get(f"{attention}.o_proj.bias"),
            query_norm=tensors.get(f"{attention}.q_norm.weight"),
            key_norm=tensors.get(f"{attention}.k_norm.weight"),
            post_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
            gate=tensors[f"{prefix}.{mlp}.gate_proj.weight"],
            up=tensors[f"{prefix}.{mlp}.up_proj.weight"],
            down=tensors[f"{prefix}.{mlp}.down_proj.weight"],
            eps=self.rms_norm_eps,
            head_dim=self.head_dim,
            activation=self.hidden_act,
        )

    @property
    def eps(self) -> float:
        """Of norms."""
        return self.rms_norm_eps

    def layer(self, tensors: Mapping[str, Tensor], prefix: str, index: int, window: int | None = None) -> LlamaLayer:
        """A layer behind its input norm."""
        return LlamaLayer(self.weights(tensors, prefix), index, window)

    def rotary(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The configuration as it is."""
        return config


def optional_norm(tensors: Mapping[str, Tensor], name: str | None, eps: float) -> nn.Module | None:
    """An RMS norm from a tensor; None without a name or a tensor."""
    weight = None if name is None else tensors.get(name)
    return None if weight is None else rms_norm(weight, eps)


def vocabulary_shapes(checkpoint: HeadCheckpoint, width: int, target: TargetModel) -> dict[str, Shape]:
    """Names and shapes of the tensors that `load_vocabulary` takes, for `HeadCheckpoint.take`.

    Args:
        checkpoint: of the head.
        width: of the head's hidden states.
        target: the target.
    """
    vocab_size, draft = target.info.vocab_size, draft_vocab_size(checkpoint, target)
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (vocab_size, width),
        "lm_head.weight": (draft, width),
        "d2t": (draft,),
        "token_map": (draft,),
        "t2d": checkpoint.shapes.get("t2d", (vocab_size,)),
    }
    return shapes


def draft_vocab_size(checkpoint: HeadCheckpoint, target: TargetModel) -> int:
    """Rows of the head's output: from its map, else its configuration, else the target's vocabulary."""
    for name in ("d2t", "token_map"):
        if name in checkpoint.shapes:
            return checkpoint.shapes[name][0]
    return int(checkpoint.config.get("draft_vocab_size") or target.info.vocab_size)


def load_vocabulary(
    checkpoint: HeadCheckpoint, tensors: Mapping[str, Tensor], width: int, target: TargetModel
) -> Vocabulary:
    """What a head reads and writes tokens with; what the checkpoint lacks is the target's.

    Args:
        checkpoint: of the head.
        tensors: those of `vocabulary_shapes` that are stored, in the dtype to compute in.
        width: of the head's hidden states.
        target: the target.

    Raises:
        ModelLoadError: the map is wrong.
        PluginUnsuitableError: the target's part would be needed, but has another width.
    """
    vocab_size, size = target.info.vocab_size, draft_vocab_size(checkpoint, target)
    target_ids = target_ids_of(tensors, size, vocab_size, checkpoint.directory)
    if "embed_tokens.weight" not in tensors or "lm_head.weight" not in tensors:
        check_target(checkpoint.directory, target.info, hidden_size=(width, target.info.hidden_size))
    table = tensors.get("embed_tokens.weight")
    head = tensors.get("lm_head.weight")
    if head is not None:
        output = linear(head)
    elif target_ids is None:
        output = target_output(target)
    else:
        output = linear(target_output_rows(target, target_ids))
    return Vocabulary(
        embed=target_embedding(target) if table is None else embedding(table),
        output=output,
        size=size,
        target_ids=None if target_ids is None else target_ids.to(target.device),
        scale=float(checkpoint.config.get("logit_scale") or 1.0),
    )


def weight_bytes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Memory of a head's own weights, for `DraftHead.memory`."""
    return {"weights": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())}


def as_rows(halves: Tensor, head_dim: int) -> Tensor:
    """Reorder a query or key projection from interleaved to half-split rotary rows.

    Args:
        halves: [heads * head_dim, in], rows of a head are pairs (0, 1), (2, 3), …
        head_dim: width of a head.

    Returns:
        The same rows with all first members of the pairs before all second ones, head by head.
    """
    width = halves.shape[1]
    return halves.view(-1, head_dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
