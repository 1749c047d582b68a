"""EAGLE heads with Llama-like layers: every layout loads, and computes what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import attended, gated, norm, rotated, run_head
from specdec_eagle_llama.eagle import load_eagle

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
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
}


def tensors_of(**more):
    """The authors' tensors; ``more`` adds shapes."""
    layer = "layers.0"
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (32, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (16, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (16, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, 32),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.mlp.gate_proj.weight": (48, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (48, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, 48),
    }
    return random_tensors(shapes | more)


def straight_line(w, hidden, embedded, positions):
    if "embed_layernorm.weight" in w:
        embedded = norm(embedded, w["embed_layernorm.weight"])
    z = F.linear(torch.cat([embedded, hidden], -1), w["fc.weight"], w.get("fc.bias"))
    u = norm(z, w["hidden_layernorm.weight"]) if "hidden_layernorm.weight" in w else z
    a = "layers.0.self_attn"
    q, k, v = (
        F.linear(u, w[f"{a}.{part}_proj.weight"], w.get(f"{a}.{part}_proj.bias")).view(len(z), -1, 8) for part in "qkv"
    )
    out = attended(rotated(q, positions, THETA), rotated(k, positions, THETA), v, positions)
    y = z + F.linear(out, w[f"{a}.o_proj.weight"])
    mlp = [f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    return y + gated(w, *mlp, norm(y, w["layers.0.post_attention_layernorm.weight"]))


def check(path, w, target):
    """Compare a pass and the logits; weights by the authors' names."""
    head = load_eagle(path, {}, target)
    hidden, ids, positions = sample()
    table = w.get("embed_tokens.weight", target.model.get_input_embeddings().weight)
    expected = straight_line(w, hidden, table[ids], positions)
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    last = norm(expected, w["lm_head_layernorm.weight"]) if "lm_head_layernorm.weight" in w else expected
    rows = w.get("lm_head.weight", target.model.get_output_embeddings().weight)
    torch.testing.assert_close(head.logits(expected), F.linear(last, rows), rtol=1e-4, atol=1e-4)
    assert head.taps == ()
    return head


def test_authors_layout(tmp_path, target):
    """A pickled file, a copy of the embeddings, no norm in the layer's beginning or behind it."""
    w = tensors_of(**{"embed_tokens.weight": (VOCAB, HIDDEN)})
    check(write_head(tmp_path, CONFIG, w, weights="pytorch_model.bin"), w, target)


def test_biases(tmp_path, target):
    """Of the fusion and, for Qwen2, of query, key and value; whether they exist the tensors say."""
    biases = {f"layers.0.self_attn.{part}_proj.bias": (32 if part == "q" else 16,) for part in "qkv"}
    w = tensors_of(**{"fc.bias": (HIDDEN,)}, **biases)
    check(write_head(tmp_path, CONFIG | {"bias": False}, w), w, target)


def test_layers_settings_in_a_table(tmp_path, target):
    """The older layout of vLLM: settings in the table ``model``, prefixed names, a truncated vocabulary."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:30]
    w = tensors_of(**{"lm_head.weight": (30, HIDDEN)})
    stored = {name if name.startswith(("fc", "lm_head")) else f"model.model.{name}": t for name, t in w.items()}
    config = {"model_type": "eagle", "truncated_vocab_size": 30, "eagle_fc_bias": False, "model": CONFIG}
    head = check(write_head(tmp_path, config, stored | {"token_map": ids}), w, target)
    assert torch.equal(head.to_target_ids(torch.arange(30)), ids)


def test_speculators_layout_with_norms(tmp_path, target):
    names = ("embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight")
    w = tensors_of(**dict.fromkeys(names, (HIDDEN,)))
    stored = {}
    for name, tensor in w.items():
        new = name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")
        new = new.replace("embed_layernorm", "embedding_layernorm").replace("lm_head_layer", "pre_lm_head_layer")
        stored[new.replace("hidden_layernorm", "transformer.input_layernorm")] = tensor
    config = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "layernorms": True,
        "transformer_layer_config": CONFIG,
    }
    check(write_head(tmp_path / "a", config, stored), w, target)
    check(write_head(tmp_path / "b", CONFIG, w), w, target)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["fc.weight"]
    with pytest.raises(ModelLoadError, match="missing: fc.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of()), {}, target)
