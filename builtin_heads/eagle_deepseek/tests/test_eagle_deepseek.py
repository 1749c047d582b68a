"""Heads with DeepSeek layers compute what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import gated, latent_attention, norm, run_head
from specdec_eagle_deepseek.eagle import load_eagle
from specdec_eagle_deepseek.eagle3 import load_eagle3

VOCAB, HIDDEN, THETA = 80, 32, 5000.0


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    module = tiny_module("llama", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=8)
    return TargetModel.from_model(module, name="tiny")


def sample():
    generator = torch.Generator().manual_seed(5)
    hidden, ids = torch.randn(9, HIDDEN, generator=generator), torch.randint(VOCAB, (9,), generator=generator)
    return hidden, ids, torch.arange(9) + 3


HEADS, NOPE, ROPE, VALUE, LATENT, LOW, INNER = 4, 8, 4, 6, 12, 10, 48
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "q_lora_rank": LOW,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
}


def layer_shapes(name, width=HIDDEN):
    a = f"{name}.self_attn"
    return {
        f"{name}.input_layernorm.weight": (HIDDEN,),
        f"{a}.q_a_proj.weight": (LOW, width),
        f"{a}.q_a_layernorm.weight": (LOW,),
        f"{a}.q_b_proj.weight": (HEADS * (NOPE + ROPE), LOW),
        f"{a}.kv_a_proj_with_mqa.weight": (LATENT + ROPE, width),
        f"{a}.kv_a_layernorm.weight": (LATENT,),
        f"{a}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        f"{a}.o_proj.weight": (HIDDEN, HEADS * VALUE),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
    }


EXPERTS, NARROW = 8, 10
MIXTURE = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": NARROW,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def mixture_shapes(name):
    """A layer with experts in place of the dense feed-forward part."""
    shapes = {key: shape for key, shape in layer_shapes(name).items() if ".mlp." not in key}
    shapes |= {f"{name}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{name}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    for part, inner in (("shared_experts", 2 * NARROW), *((f"experts.{i}", NARROW) for i in range(EXPERTS))):
        shapes |= {
            f"{name}.mlp.{part}.gate_proj.weight": (inner, HIDDEN),
            f"{name}.mlp.{part}.up_proj.weight": (inner, HIDDEN),
            f"{name}.mlp.{part}.down_proj.weight": (HIDDEN, inner),
        }
    return shapes


def tensors_of(layer_shapes=layer_shapes):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("layers.0")}
    return random_tensors(shapes | dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), (HIDDEN,)))


def layer(w, name, inputs, residual, positions, scaling=None, feed_forward=None):
    """What comes behind the input norm."""

    def part(short):
        return f"{name}.self_attn.{short}.weight"

    sizes = {"heads": HEADS, "nope": NOPE, "rope": ROPE, "theta": THETA, "scaling": scaling}
    y = residual + latent_attention(w, part, inputs, positions, **sizes)
    y_normed = norm(y, w[f"{name}.post_attention_layernorm.weight"])
    if feed_forward is not None:
        return y + feed_forward(y_normed)
    mlp = [f"{name}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    return y + gated(w, *mlp, y_normed)


def expected_states(w, target, feed_forward=None):
    """What an EAGLE head computes for the `sample`."""
    hidden, ids, positions = sample()
    table = target.model.get_input_embeddings().weight
    both = torch.cat([norm(table[ids], w["enorm.weight"]), norm(hidden, w["hnorm.weight"])], -1)
    z = F.linear(both, w["fc.weight"])
    z = layer(w, "layers.0", norm(z, w["layers.0.input_layernorm.weight"]), z, positions, feed_forward=feed_forward)
    return norm(z, w["norm.weight"])


def test_eagle(tmp_path, target):
    """Both inputs are normed before the fusion; the output is normed for the logits and for the next row."""
    w = tensors_of()
    head = load_eagle(write_head(tmp_path, CONFIG, {f"model.{name}": t for name, t in w.items()}), {}, target)
    hidden, ids, positions = sample()
    expected = expected_states(w, target)
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    rows = target.model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(expected), F.linear(expected, rows), rtol=1e-4, atol=1e-4)


def their_mixture(w, name):
    """The feed-forward part of transformers' layer with the head's weights: [T, h] -> [T, h]."""
    module = DeepseekV3DecoderLayer(DeepseekV3Config(**(CONFIG | MIXTURE)), 3).mlp
    parts = {
        part: torch.stack([w[f"{name}.experts.{i}.{part}_proj.weight"] for i in range(EXPERTS)])
        for part in ("gate", "up", "down")
    }
    state = {key.removeprefix(f"{name}."): t for key, t in w.items() if key.startswith(name) and ".experts." not in key}
    state |= {
        "experts.gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1),
        "experts.down_proj": parts["down"],
    }
    module.load_state_dict(state, strict=True)
    return lambda rows: module(rows[None])[0].detach()


def test_eagle_with_a_mixture_of_experts(tmp_path, target):
    """The feed-forward part is that of transformers' DeepSeek-V3 layer, groups of experts included."""
    w = tensors_of(mixture_shapes)
    head = load_eagle(write_head(tmp_path, CONFIG | MIXTURE, w), {}, target)
    hidden, ids, positions = sample()
    expected = expected_states(w, target, their_mixture(w, "layers.0.mlp"))
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model_type", "corrected"), [("deepseek_v3", True), ("deepseek_v2", False)])
def test_routers_that_the_configuration_does_not_describe(tmp_path, target, model_type, corrected):
    """DeepSeek-V3 chooses with a trained correction, which DeepSeek-V2 does not have."""
    config = {key: value for key, value in (CONFIG | MIXTURE).items() if key not in ("scoring_func", "topk_method")}
    w = tensors_of(mixture_shapes)
    if not corrected:
        del w["layers.0.mlp.gate.e_score_correction_bias"]
    load_eagle(write_head(tmp_path / "a", config | {"model_type": model_type}, w), {}, target)
    other = {"deepseek_v3": "deepseek_v2", "deepseek_v2": "deepseek_v3"}[model_type]
    with pytest.raises(ModelLoadError, match="e_score_correction_bias"):
        load_eagle(write_head(tmp_path / "b", config | {"model_type": other}, w), {}, target)


def test_eagle3(tmp_path, target):
    """The first layer's low projections take embedding and hidden state side by side."""
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    w = random_tensors(shapes | layer_shapes("midlayer", 2 * HIDDEN))
    head = load_eagle3(write_head(tmp_path, CONFIG, w), {}, target)
    hidden, ids, positions = sample()
    states = (hidden, hidden.flip(0), hidden.roll(1, 0))
    g = F.linear(torch.cat(states, -1), w["fc.weight"])
    e = norm(target.model.get_input_embeddings().weight[ids], w["midlayer.input_layernorm.weight"])
    inputs = torch.cat([e, norm(g, w["midlayer.hidden_norm.weight"])], -1)
    expected = layer(w, "midlayer", inputs, g, positions)
    torch.testing.assert_close(run_head(head, states, ids, positions), expected, rtol=1e-4, atol=1e-4)
    assert head.attention_layers[0].head_dim == NOPE + ROPE
    assert head.attention_layers[0].v_head_dim == VALUE


def test_mixtures_that_do_not_fit_are_refused(tmp_path, target):
    """Whatever a mixture lacks or has too much is named; EAGLE-3 heads are dense, whatever their configuration says."""
    tensors = tensors_of(mixture_shapes)
    del tensors["layers.0.mlp.gate.e_score_correction_bias"], tensors["layers.0.mlp.experts.2.up_proj.weight"]
    tensors |= random_tensors({"layers.0.mlp.experts.8.up_proj.weight": (NARROW, HIDDEN)})
    message = (
        "missing: layers.0.mlp.gate.e_score_correction_bias, layers.0.mlp.experts.2.up_proj.weight; "
        "not part of the head: layers.0.mlp.experts.8.up_proj.weight"
    )
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(write_head(tmp_path / "a", CONFIG | MIXTURE, tensors), {}, target)
    tensors = tensors_of() | random_tensors({"layers.0.mlp.experts.0.gate_proj.weight": (8, HIDDEN)})
    with pytest.raises(ModelLoadError, match="not part of the head: layers.0.mlp.experts.0.gate_proj.weight"):
        load_eagle(write_head(tmp_path / "b", CONFIG, tensors), {}, target)
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "layers.0.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    dense = random_tensors(shapes | layer_shapes("layers.0", 2 * HIDDEN))
    load_eagle3(write_head(tmp_path / "c", CONFIG | MIXTURE | {"first_k_dense_replace": 0}, dense), {}, target)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["hnorm.weight"]
    with pytest.raises(ModelLoadError, match="missing: hnorm.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of()), {}, target)
