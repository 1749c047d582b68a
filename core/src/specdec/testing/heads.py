"""Tiny random head checkpoints, in whatever layout a test describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def random_tensors(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Random float32 tensors; vectors lie around 1 when their name says norm, else around 0.

    Args:
        shapes: by name.
        seed: fixes the values.
        scale: standard deviation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: tensor + 1.0 if len(tensor.shape) == 1 and "norm" in name else tensor for name, tensor in tensors.items()
    }


def write_head(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    weights: str = "model.safetensors",
    config_file: str = "config.json",
) -> Path:
    """Write a checkpoint directory.

    Args:
        directory: made when absent.
        config: content of the configuration file.
        tensors: by their stored names.
        weights: name of the weight file; anything but ``.safetensors`` is written by `torch.save`.
        config_file: name of the configuration file.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / config_file).write_text(json.dumps(dict(config), indent=2))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if weights.endswith(".safetensors"):
        save_file(stored, path / weights)
    else:
        torch.save(stored, path / weights)
    return path


def vocabulary_map(vocab_size: int, draft_vocab_size: int, *, seed: int = 0) -> dict[str, Tensor]:
    """A random reduced vocabulary as the tensors ``d2t`` (offsets) and ``t2d`` (mask)."""
    import torch

    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    ids = order[:draft_vocab_size].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab_size), "t2d": mask}


def tiny_head(layout: str, target: str | Path, directory: str | Path, *, seed: int = 0) -> Path:
    """Write a random head for a tiny target, in the layout its authors publish.

    Args:
        layout: ``eagle``, ``eagle3``, ``peagle`` (an EAGLE-3 head that drafts in parallel), ``medusa`` or
            ``mlp_speculator``.
        target: checkpoint directory of a Llama-like target, as `specdec.testing.tiny_model` writes it.
        directory: made when absent.
        seed: fixes the weights.

    Raises:
        ValueError: there is no such layout.
    """
    config = json.loads((Path(target) / "config.json").read_text())
    layouts = {
        "eagle": _eagle,
        "eagle3": _eagle3,
        "peagle": _peagle,
        "medusa": _medusa,
        "mlp_speculator": _mlp_speculator,
    }
    if layout not in layouts:
        raise ValueError(f"no layout {layout!r}; known: {', '.join(layouts)}")
    return layouts[layout](config, Path(directory), seed)


_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "rope_theta",
)  # fmt: skip


def layer_shapes(config: Mapping[str, Any], name: str, input_width: int | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-like layer's tensors but for the input norm, with transformers' names.

    Args:
        config: with transformers' keys.
        name: the layer's, ``layers.0`` for example.
        input_width: of query, key and value; None: the hidden size.
    """
    h, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    width = input_width or h
    return {
        f"{name}.self_attn.q_proj.weight": (queries, width),
        f"{name}.self_attn.k_proj.weight": (keys, width),
        f"{name}.self_attn.v_proj.weight": (keys, width),
        f"{name}.self_attn.o_proj.weight": (h, queries),
        f"{name}.post_attention_layernorm.weight": (h,),
        f"{name}.mlp.gate_proj.weight": (inner, h),
        f"{name}.mlp.up_proj.weight": (inner, h),
        f"{name}.mlp.down_proj.weight": (h, inner),
    }


def _eagle(target: Mapping[str, Any], path: Path, seed: int) -> Path:
    config = {key: target[key] for key in _LAYER_KEYS if key in target}
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    h = config["hidden_size"]
    shapes = {"fc.weight": (h, 2 * h), "fc.bias": (h,), **layer_shapes(config, "layers.0")}
    return write_head(path, config, random_tensors(shapes, seed=seed), weights="pytorch_model.bin")


def _eagle3(target: Mapping[str, Any], path: Path, seed: int) -> Path:
    vocab_size, num_layers = target["vocab_size"], target["num_hidden_layers"]
    boundaries = sorted({1, (num_layers + 1) // 2, num_layers})
    config = {key: target[key] for key in _LAYER_KEYS if key in target}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab_size // 2,
        "eagle_aux_hidden_state_layer_ids": boundaries,
    }
    h = config["hidden_size"]
    shapes = {
        "fc.weight": (h, len(boundaries) * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        **layer_shapes(config, "midlayer", 2 * h),
        "norm.weight": (h,),
        "lm_head.weight": (vocab_size // 2, h),
    }
    tensors = random_tensors(shapes, seed=seed) | vocabulary_map(vocab_size, vocab_size // 2, seed=seed)
    return write_head(path, config, tensors)


def _peagle(target: Mapping[str, Any], path: Path, seed: int) -> Path:
    """In the layout of ``speculators``: two layers, embeddings of its own, a mask id and the mask's hidden states."""
    vocab_size, num_layers = target["vocab_size"], target["num_hidden_layers"]
    boundaries = sorted({1, (num_layers + 1) // 2, num_layers})
    layer = {key: target[key] for key in _LAYER_KEYS if key in target} | {"num_hidden_layers": 2}
    config = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer,
        "draft_vocab_size": vocab_size // 2,
        "eagle_aux_hidden_state_layer_ids": boundaries,
        "mask_token_id": vocab_size - 1,
    }
    h = layer["hidden_size"]
    shapes = {
        "embed_tokens.weight": (vocab_size, h),
        "fc.weight": (h, len(boundaries) * h),
        "mask_hidden": (1, 1, len(boundaries) * h),
        "layers.0.input_layernorm.weight": (h,),
        "layers.0.hidden_norm.weight": (h,),
        **layer_shapes(layer, "layers.0", 2 * h),
        "layers.1.input_layernorm.weight": (h,),
        **layer_shapes(layer, "layers.1"),
        "norm.weight": (h,),
        "lm_head.weight": (vocab_size // 2, h),
    }
    tensors = random_tensors(shapes, seed=seed) | vocabulary_map(vocab_size, vocab_size // 2, seed=seed)
    tensors["mask_hidden"] *= 5  # as large as hidden states
    return write_head(path, config, tensors)


def _medusa(target: Mapping[str, Any], path: Path, seed: int) -> Path:
    h, vocab_size, heads = target["hidden_size"], target["vocab_size"], 4
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        shapes |= {f"{i}.0.linear.weight": (h, h), f"{i}.0.linear.bias": (h,), f"{i}.1.weight": (vocab_size, h)}
    config = {"base_model_name_or_path": "tiny", "medusa_num_heads": heads, "medusa_num_layers": 1}
    return write_head(path, config, random_tensors(shapes, seed=seed), weights="medusa_lm_head.pt")


def _mlp_speculator(target: Mapping[str, Any], path: Path, seed: int) -> Path:
    h, vocab_size, inner, n = target["hidden_size"], target["vocab_size"], 24, 3
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(n):
        shapes |= {
            f"speculator.emb.{i}.weight": (vocab_size, inner),
            f"speculator.proj.{i}.weight": (inner, inner if i else h),
            f"speculator.head.{i}.weight": (vocab_size, inner),
            f"speculator.ln.{i}.weight": (inner,),
            f"speculator.ln.{i}.bias": (inner,),
        }
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": h,
        "inner_dim": inner,
        "n_predict": n,
        "vocab_size": vocab_size,
        "top_k_tokens_per_head": [3, 2, 2],
        "n_candidates": 3,
        "tie_weights": False,
        "scale_input": False,
    }
    return write_head(path, config, random_tensors(shapes, seed=seed))
