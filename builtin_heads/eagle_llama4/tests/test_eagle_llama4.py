"""EAGLE heads with Llama 4 layers compute what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import attended, gated, norm, rotated, run_head
from specdec_eagle_llama4.eagle import load_eagle

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


CONFIG = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 999,
    "intermediate_size_mlp": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "no_rope_layers": [1, 0],
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.3,
}


def tensors_of():
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (32, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (16, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (16, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, 32),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.feed_forward.gate_proj.weight": (48, HIDDEN),
            f"{layer}.feed_forward.up_proj.weight": (48, HIDDEN),
            f"{layer}.feed_forward.down_proj.weight": (HIDDEN, 48),
        }
    return random_tensors(shapes)


def layer(w, name, z, positions, *, rotates):
    u = norm(z, w[f"{name}.input_layernorm.weight"])
    q, k, v = (F.linear(u, w[f"{name}.self_attn.{part}_proj.weight"]).view(len(u), -1, 8) for part in "qkv")
    if rotates:
        q, k = (norm(rotated(part, positions, THETA, interleaved=True)) for part in (q, k))
    else:
        q = q * (1 + 0.3 * torch.log(1 + torch.floor((positions + 1) / 4.0)))[:, None, None]
    y = z + F.linear(attended(q, k, v, positions), w[f"{name}.self_attn.o_proj.weight"])
    mlp = [f"{name}.feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")]
    return y + gated(w, *mlp, norm(y, w[f"{name}.post_attention_layernorm.weight"]))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_layers_with_and_without_rotation(tmp_path, target, prefix):
    w = tensors_of()
    head = load_eagle(write_head(tmp_path, CONFIG, {prefix + name: t for name, t in w.items()}), {}, target)
    hidden, ids, positions = sample()
    table = target.model.get_input_embeddings().weight
    z = F.linear(torch.cat([table[ids], hidden], -1), w["fc.weight"])
    z = layer(w, "layers.0", z, positions, rotates=True)
    expected = norm(layer(w, "layers.1", z, positions, rotates=False), w["norm.weight"])
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    rows = target.model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(expected), F.linear(expected, rows), rtol=1e-4, atol=1e-4)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["layers.1.input_layernorm.weight"]
    with pytest.raises(ModelLoadError, match="missing: layers.1.input_layernorm.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of()), {}, target)
