"""EAGLE heads in the native Mistral format compute what a straight-line program computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec.testing.straight_line import attended, gated, norm, rotated, run_head
from specdec_eagle_mistral.eagle import load_eagle

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


PARAMS = {
    "dim": HIDDEN,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 48,
    "norm_eps": 1e-5,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "llama_4_scaling": {"original_max_position_embeddings": 4, "beta": 0.3},
}
CONFIG = PARAMS
FILES = {"weights": "consolidated.safetensors", "config_file": "params.json"}


def tensors_of():
    layer = "layers.0"
    return random_tensors(
        {
            "eagle_linear.weight": (HIDDEN, 2 * HIDDEN),
            f"{layer}.attention_norm.weight": (HIDDEN,),
            f"{layer}.attention.wq.weight": (32, HIDDEN),
            f"{layer}.attention.wk.weight": (16, HIDDEN),
            f"{layer}.attention.wv.weight": (16, HIDDEN),
            f"{layer}.attention.wo.weight": (HIDDEN, 32),
            f"{layer}.ffn_norm.weight": (HIDDEN,),
            f"{layer}.feed_forward.w1.weight": (48, HIDDEN),
            f"{layer}.feed_forward.w3.weight": (48, HIDDEN),
            f"{layer}.feed_forward.w2.weight": (HIDDEN, 48),
            "norm.weight": (HIDDEN,),
        }
    )


def test_native_layout(tmp_path, target):
    """Neighbouring rotary pairs, queries that grow with the position, a norm behind the layer."""
    w = tensors_of()
    head = load_eagle(write_head(tmp_path, PARAMS, w, **FILES), {}, target)
    hidden, ids, positions = sample()
    table = target.model.get_input_embeddings().weight
    z = F.linear(torch.cat([table[ids], hidden], -1), w["eagle_linear.weight"])
    u = norm(z, w["layers.0.attention_norm.weight"])
    q, k, v = (F.linear(u, w[f"layers.0.attention.w{part}.weight"]).view(len(u), -1, 8) for part in "qkv")
    q, k = (rotated(part, positions, THETA, interleaved=True) for part in (q, k))
    growth = 1 + 0.3 * torch.log(1 + torch.floor(positions / 4.0))
    y = z + F.linear(attended(q * growth[:, None, None], k, v, positions), w["layers.0.attention.wo.weight"])
    mlp = [f"layers.0.feed_forward.{part}.weight" for part in ("w1", "w3", "w2")]
    expected = norm(y + gated(w, *mlp, norm(y, w["layers.0.ffn_norm.weight"])), w["norm.weight"])
    torch.testing.assert_close(run_head(head, (hidden,), ids, positions), expected, rtol=1e-4, atol=1e-4)
    rows = target.model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(expected), F.linear(expected, rows), rtol=1e-4, atol=1e-4)


def test_quantised_weights_are_refused(tmp_path, target):
    path = write_head(tmp_path, PARAMS | {"quantization": {"qformat_weight": "fp8_e4m3"}}, tensors_of(), **FILES)
    with pytest.raises(ModelLoadError, match="its weights are quantised"):
        load_eagle(path, {}, target)


def test_misfits_are_refused(tmp_path, target):
    tensors = tensors_of()
    del tensors["norm.weight"]
    with pytest.raises(ModelLoadError, match="missing: norm.weight"):
        load_eagle(write_head(tmp_path / "a", CONFIG, tensors, **FILES), {}, target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 81 where the target has 80"):
        load_eagle(write_head(tmp_path / "b", CONFIG | {"vocab_size": 81}, tensors_of(), **FILES), {}, target)
