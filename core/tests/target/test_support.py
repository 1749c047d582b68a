"""Architectures that cannot be targets are refused with every reason, in words."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.attention.dense import dense_attention
from specdec.errors import UnsupportedModelError
from specdec.target.model import TargetModel
from specdec.testing import tiny_config, tiny_module

NOT_REPLACEABLE = r"does not go through transformers' attention interface"
OTHER_STATE = r"which keep a state other than keys and values"


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("bloom", {"n_head": 4, "n_layer": 2}, NOT_REPLACEABLE),
        ("falcon", {"alibi": True}, r"uses ALiBi"),
        ("falcon", {}, NOT_REPLACEABLE),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, NOT_REPLACEABLE),
        ("mamba", {}, OTHER_STATE),
        ("jamba", {}, OTHER_STATE),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, r"layers of type 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"layers of type 'conv'"),
        ("recurrent_gemma", {}, OTHER_STATE),
        ("bert", {}, r"neither causal nor a causal sliding window"),
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, r"packed tokens give other logits than single sequences"),
        ("doge", {}, r"adds biases to its attention scores"),
        ("diffllama", {}, r"several layers share one attention module"),
    ],
)
def test_refused_architectures(architecture, changes, reason):
    config = small_config(architecture, changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(
        UnsupportedModelError, match=rf"model: 'mine' \(model_type '{architecture}'\) cannot be a target"
    ) as e:
        TargetModel.from_model(model, name="mine", fuse=False)
    assert any(re.search(reason, each) for each in e.value.reasons), e.value.reasons
    assert all(f"\n  - {each}" in str(e.value) for each in e.value.reasons)


def small_config(architecture, changes):
    if architecture != "falcon":  # its configuration has no head_dim to set
        return tiny_config(architecture, **changes)
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoConfig.for_model(architecture, **sizes, **changes)


def target_of(model):
    return TargetModel.from_model(model, name="mine", fuse=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_look_at_their_neighbours_are_found(dtype):
    """A model whose attention is plain, but whose MLP mixes in the token before."""
    model = tiny_module("llama").to(dtype)
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x + torch.roll(x, 1, dims=1) * (torch.arange(x.shape[1])[None, :, None] > 0))
    with pytest.raises(UnsupportedModelError, match=r"depend on (more than attention|other sequences)"):
        target_of(model)


def test_layers_that_count_positions_themselves_are_found():
    model = tiny_module("llama")
    norm = model.model.layers[0].input_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(
        x * (1 + torch.arange(x.shape[1])[None, :, None]) ** 0.5 + torch.arange(x.shape[1])[None, :, None]
    )
    with pytest.raises(UnsupportedModelError, match=r"depend on more than attention over earlier tokens"):
        target_of(model)


def test_biases_inside_attention_modules_are_found():
    """What a module adds to the scores after the interface was asked cannot be recorded, only noticed."""
    model = tiny_module("llama")
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *a, **k: (plain(*a, **k)[0].cumsum(1), None)
    with pytest.raises(UnsupportedModelError, match=r"depend on more than attention over earlier tokens"):
        target_of(model)


def test_layers_without_replaceable_attention_are_counted():
    model = tiny_module("llama", num_hidden_layers=3)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states * 0, None)
    with pytest.raises(UnsupportedModelError, match=r"only 2 of its 3 layers use attention that can be replaced"):
        target_of(model)


def test_a_forward_pass_that_fails_is_a_reason():
    model = tiny_module("llama")
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"a forward pass over a few tokens fails: RuntimeError"):
        target_of(model)


def test_unknown_inputs_of_attention_are_named(monkeypatch):
    import transformers.models.llama.modeling_llama as module

    interface = module.ALL_ATTENTION_FUNCTIONS.get_interface

    def with_bias(*args):
        function = interface(*args)
        return lambda *a, **k: function(*a, **{**k, "position_bias": torch.zeros(1)})

    model = tiny_module("llama")
    monkeypatch.setattr(module.ALL_ATTENTION_FUNCTIONS, "get_interface", with_bias)
    with pytest.raises(UnsupportedModelError, match=r"takes inputs that backends do not know: position_bias$"):
        target_of(model)


def test_reasons_name_the_layers_they_hold_for():
    config = tiny_config("bert", is_decoder=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layers = model.bert.encoder.layer
    layers[1].attention.self = layers[0].attention.self
    with pytest.raises(UnsupportedModelError, match=r"share one attention module \(layers 1\)"):
        target_of(model)


def test_dense_attention_is_softmax_attention():
    query, key, value = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(dense_attention(query, key, value, allowed, 0.3), expected.transpose(0, 1))
