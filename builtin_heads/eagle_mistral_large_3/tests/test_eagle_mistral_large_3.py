"""EAGLE heads of Mistral Large 3 compute what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import gated, latent_attention, norm, run_head
from specdec_eagle_mistral_large_3.eagle import load_eagle

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
PARAMS = {
    "dim": HIDDEN,
    "n_layers": 1,
    "n_heads": HEADS,
    "hidden_dim": INNER,
    "norm_eps": 1e-5,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "q_lora_rank": LOW,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "llama_4_scaling": {"original_max_position_embeddings": 4, "beta": 0.3},
}
CONFIG = PARAMS
FILES = {"weights": "consolidated.safetensors", "config_file": "params.json"}
SHORT = {
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_a_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
}


def tensors_of():
    a, f = "layers.0.attention", "layers.0.feed_forward"
    return random_tensors(
        {
            "eagle_linear.weight": (HIDDEN, 2 * HIDDEN),
            "layers.0.attention_norm.weight": (HIDDEN,),
            f"{a}.wq_a.weight": (LOW, HIDDEN),
            f"{a}.q_a_norm.weight": (LOW,),
            f"{a}.wq_b.weight": (HEADS * (NOPE + ROPE), LOW),
            f"{a}.wkv_a_with_mqa.weight": (LATENT + ROPE, HIDDEN),
            f"{a}.kv_a_norm.weight": (LATENT,),
            f"{a}.wkv_b.weight": (HEADS * (NOPE + VALUE), LATENT),
            f"{a}.wo.weight": (HIDDEN, HEADS * VALUE),
            "layers.0.ffn_norm.weight": (HIDDEN,),
            f"{f}.w1.weight": (INNER, HIDDEN),
            f"{f}.w3.weight": (INNER, HIDDEN),
            f"{f}.w2.weight": (HIDDEN, INNER),
            "norm.weight": (HIDDEN,),
        }
    )


EXPERTS, NARROW = 6, 10
MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "expert_hidden_dim": NARROW,
    "num_shared_experts": 1,
    "num_expert_groups": 1,
    "num_expert_groups_per_tok": 1,
    "routed_scale": 1.5,
    "first_k_dense_replace": 3,
    "route_every_n": 1,
    "renorm_strategy": "WEIGHTS",
}


def mixture_tensors():
    """A head whose layer has experts in place of the dense feed-forward part."""
    shapes = {"layers.0.gate.weight": (EXPERTS, HIDDEN)}
    for part in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
        shapes |= {f"layers.0.{part}.{w}.weight": (NARROW, HIDDEN) for w in ("w1", "w3")}
        shapes[f"layers.0.{part}.w2.weight"] = (HIDDEN, NARROW)
    dense = {name: t for name, t in tensors_of().items() if ".feed_forward." not in name}
    return dense | random_tensors(shapes, seed=1, scale=0.3)


def dense_part(w, x):
    return gated(w, *(f"layers.0.feed_forward.{part}.weight" for part in ("w1", "w3", "w2")), x)


def mixture(w, x):
    """Row by row: the two experts of the largest probabilities, divided by their sum, and the shared one."""

    def expert(name, row):
        return gated(w, *(f"layers.0.{name}.{part}.weight" for part in ("w1", "w3", "w2")), row)

    rows = []
    for row in x:
        scores = w["layers.0.gate.weight"] @ row
        probabilities = (scores.exp() / scores.exp().sum()).tolist()
        first, second = sorted(range(EXPERTS), key=lambda i: -probabilities[i])[:2]
        whole = probabilities[first] + probabilities[second]
        routed = sum(probabilities[i] / whole * expert(f"experts.{i}", row) for i in (first, second))
        rows.append(expert("shared_experts", row) + 1.5 * routed)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("params", "tensors", "feed_forward"),
    [(PARAMS, tensors_of, dense_part), (PARAMS | {"moe": MOE}, mixture_tensors, mixture)],
    ids=["dense", "mixture"],
)
def test_native_layout(tmp_path, target, params, tensors, feed_forward):
    """Latent attention under Mistral's names, queries that grow with the position, a norm behind the layer."""
    w = tensors()
    head = load_eagle(write_head(tmp_path, params, w, **FILES), {}, target)
    hidden, ids, positions = sample()
    table = target.model.get_input_embeddings().weight
    z = F.linear(torch.cat([table[ids], hidden], -1), w["eagle_linear.weight"])
    u = norm(z, w["layers.0.attention_norm.weight"])
    growth = (1 + 0.3 * torch.log(1 + torch.floor(positions / 4.0)))[:, None, None]
    sizes = {"heads": HEADS, "nope": NOPE, "rope": ROPE, "theta": THETA, "query_factor": growth}
    y = z + latent_attention(w, lambda part: f"layers.0.attention.{SHORT[part]}.weight", u, positions, **sizes)
    expected = norm(y + feed_forward(w, norm(y, w["layers.0.ffn_norm.weight"])), w["norm.weight"])
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    rows = target.model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(expected), F.linear(expected, rows), rtol=1e-4, atol=1e-4)


def test_quantised_weights_are_refused(tmp_path, target):
    path = write_head(tmp_path, PARAMS | {"quantization": {"qformat_weight": "fp8_e4m3"}}, tensors_of(), **FILES)
    with pytest.raises(ModelLoadError, match="its weights are quantised"):
        load_eagle(path, {}, target)


def test_mixtures_that_do_not_fit_are_refused(tmp_path, target):
    """Without a table ``moe`` heads are dense; with one nothing may be missing, and overrides count."""
    tensors = mixture_tensors()
    message = r"missing: layers.0.mlp.gate_proj.weight.*not part of the head: .*layers.0.mlp"
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(write_head(tmp_path / "a", PARAMS, tensors, **FILES), {}, target)
    del tensors["layers.0.experts.4.w2.weight"]
    path = write_head(tmp_path / "b", PARAMS | {"moe": MOE}, tensors, **FILES)
    with pytest.raises(ModelLoadError, match="missing: layers.0.mlp.experts.4.down_proj.weight$"):
        load_eagle(path, {}, target)
    with pytest.raises(ModelLoadError, match="num_experts_per_tok is 7, but the chosen groups hold 6 experts"):
        load_eagle(path, {"num_experts_per_tok": 7}, target)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["norm.weight"]
    with pytest.raises(ModelLoadError, match="missing: norm.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors, **FILES), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of(), **FILES), {}, target)
