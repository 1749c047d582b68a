"""EAGLE heads of MiniCPM compute what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import attended, gated, norm, rotated, run_head
from specdec_eagle_minicpm.eagle import load_eagle

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
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "mup_denominator": 32,
    "dim_model_base": 8,
}


def tensors_of():
    layer = "model.eagle_layers.0"
    return random_tensors(
        {
            "model.fc.weight": (HIDDEN, 2 * HIDDEN),
            "model.input_norm1.weight": (HIDDEN,),
            "model.input_norm2.weight": (HIDDEN,),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (32, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (16, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (16, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, 32),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (48, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (48, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, 48),
            "model.norm.weight": (HIDDEN,),
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "lm_head.weight": (VOCAB, HIDDEN),
        }
    )


def test_published_layout(tmp_path, target):
    """Scaled embeddings, scaled residuals, a scaled output, and a norm that is stored but not used."""
    w = tensors_of()
    head = load_eagle(write_head(tmp_path, CONFIG, w), {}, target)
    hidden, ids, positions = sample()
    e = norm(12 * w["model.embed_tokens.weight"][ids], w["model.input_norm1.weight"])
    z = F.linear(torch.cat([e, norm(hidden, w["model.input_norm2.weight"])], -1), w["model.fc.weight"])
    layer, c = "model.eagle_layers.0", 1.4 / 32**0.5
    u = norm(z, w[f"{layer}.input_layernorm.weight"])
    q, k, v = (F.linear(u, w[f"{layer}.self_attn.{part}_proj.weight"]).view(len(u), -1, 8) for part in "qkv")
    out = attended(rotated(q, positions, THETA), rotated(k, positions, THETA), v, positions)
    y = z + c * F.linear(out, w[f"{layer}.self_attn.o_proj.weight"])
    mlp = [f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    y = y + c * gated(w, *mlp, norm(y, w[f"{layer}.post_attention_layernorm.weight"]))
    expected = y / (HIDDEN / 8)
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    logits = F.linear(expected, w["lm_head.weight"])
    torch.testing.assert_close(head.logits(expected), logits, rtol=1e-4, atol=1e-4)


def test_the_number_of_layers_behind_the_scale_must_be_given(tmp_path, target):
    config = {key: value for key, value in CONFIG.items() if key != "mup_denominator"}
    with pytest.raises(ModelLoadError, match="its configuration has no 'mup_denominator'"):
        load_eagle(write_head(tmp_path, config, tensors_of()), {}, target)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["model.fc.weight"]
    with pytest.raises(ModelLoadError, match="missing: fc.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of()), {}, target)
