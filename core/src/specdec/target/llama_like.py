"""Recognises decoder layers built like Llama's and turns them into `FusedDecoderLayer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from specdec.target.compare import noise
from specdec.target.cpu_kit import gate_activation
from specdec.target.fused_layer import FusedDecoderLayer, LayerWeights
from specdec.target.linear import PackedWeight, packable
from specdec.target.norm import FastNorm, fast_norm
from specdec.target.passes import free
from specdec.target.probe import behaves_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def fuse_layers(layers: nn.ModuleList, forward: Callable[[], Any]) -> int:
    """Replace the layers that are llama-like, each after it has given the same results as the original.

    Args:
        layers: the decoder layers of a model; changed in place.
        forward: runs the model on a few tokens at positions that are far apart.

    Returns:
        How many were replaced.
    """
    if not any(_has_structure(layer) for layer in layers):
        return 0
    calls = _calls(layers, forward)
    count = 0
    for index, layer in enumerate(layers):
        call = calls.get(index)
        if call is not None and _has_structure(layer):
            fused = _fused(layer, index, *call)
            if fused is not None:
                layers[index] = fused
                free(layer)
                count += 1
    return count


def _calls(layers: nn.ModuleList, forward: Callable[[], Any]) -> dict[int, tuple[tuple[Any, ...], dict[str, Any]]]:
    """How the model calls each of its layers; those that may be replaced compute nothing meanwhile, if tensors are what
    they return."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    returns_tensor = False

    def noting(index: int, layer: nn.Module) -> Callable[..., Any]:
        compute, may_skip = layer.forward, _has_structure(layer)

        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal returns_tensor
            calls[index] = (args, kwargs)
            if may_skip and returns_tensor:
                return args[0] if args else kwargs["hidden_states"]
            result = compute(*args, **kwargs)
            returns_tensor |= may_skip and isinstance(result, torch.Tensor)
            return result

        return noted

    own = [vars(layer).get("forward") for layer in layers]
    for index, layer in enumerate(layers):
        layer.forward = noting(index, layer)
    try:
        forward()
    finally:
        for layer, before in zip(layers, own, strict=True):
            del layer.forward
            if before is not None:
                layer.forward = before
    return calls


def _has_structure(layer: nn.Module) -> bool:
    """Whether a layer has exactly the parts of a llama-like layer, in sizes that fit together."""
    children: dict[str, Any] = dict(layer.named_children())
    if set(children) != _LAYER:
        return False
    attention, mlp = children["self_attn"], children["mlp"]
    parts = set(dict(attention.named_children()))
    if not _ATTENTION <= parts <= _ATTENTION | _HEAD_NORMS or len(parts & _HEAD_NORMS) == 1:
        return False
    if not _MLP <= set(dict(mlp.named_children())) <= _MLP | {"act_fn"}:
        return False
    linears = [getattr(attention, name) for name in _ATTENTION] + [getattr(mlp, name) for name in _MLP]
    if not packable(*linears):
        return False
    head_dim = getattr(attention, "head_dim", None)
    return isinstance(head_dim, int) and _sizes_fit(attention, mlp, head_dim)


def _sizes_fit(attention: Any, mlp: Any, head_dim: int) -> bool:
    q, k, v, o = (getattr(attention, f"{name}_proj") for name in "qkvo")
    return (
        q.out_features % head_dim == 0
        and k.out_features == v.out_features
        and q.out_features % k.out_features == 0
        and k.out_features % head_dim == 0
        and o.in_features == q.out_features
        and mlp.gate_proj.out_features == mlp.up_proj.out_features == mlp.down_proj.in_features
        and all(getattr(attention, name).weight.numel() == head_dim for name in _HEAD_NORMS if hasattr(attention, name))
    )


def _fused(layer: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedDecoderLayer | None:
    """The fused layer, if it behaves like the original."""
    weights = _layer_weights(layer, index)
    if weights is None or "position_embeddings" not in kwargs:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    # Small inputs: norms scale them up, so that the layer's own contribution is not lost in the residual sum.
    sample = 0.01 * noise(*hidden.shape, like=hidden)
    call = ((sample, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": sample})
    for candidate in (weights, evolve(weights, rotates=False)):
        fused = FusedDecoderLayer(candidate, layer)
        if behaves_like(fused, layer, *call[0], **call[1]):
            return fused
    return None


def _layer_weights(layer: Any, index: int) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [fast_norm(layer.input_layernorm), fast_norm(layer.post_attention_layernorm)]
    head_norms: list[FastNorm | None] = [None, None]
    if hasattr(attention, "q_norm"):
        head_norms = [fast_norm(attention.q_norm), fast_norm(attention.k_norm)]
        norms += head_norms
    activation = gate_activation(mlp)
    if activation is None or norms[0] is None or norms[1] is None or None in norms:
        return None
    query_norm, key_norm = (norm.norm_weight if norm else None for norm in head_norms)
    return LayerWeights(
        index=index,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        input_norm=norms[0].norm_weight,
        qkv=PackedWeight.of([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=query_norm,
        key_norm=key_norm,
        output=PackedWeight.of([attention.o_proj]),
        post_norm=norms[1].norm_weight,
        gate_up=PackedWeight.gated(mlp.gate_proj, mlp.up_proj),
        down=PackedWeight.of([mlp.down_proj]),
        activation=activation,
    )
