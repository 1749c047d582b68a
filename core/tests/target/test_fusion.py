"""Fused models give the logits of transformers' modules, and only what is proven equal is fused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.target import bridge, passes
from specdec.target.fused_layer import FusedDecoderLayer
from specdec.target.fused_stack import FusedStack
from specdec.target.fusion import embedding_weight, fuse
from specdec.target.kit import RmsNorm, TorchKit
from specdec.target.linear import PackedEmbedding, PackedLinear
from specdec.target.parts import ModelParts, text_part
from specdec.target.trace import Trace, trace
from specdec.testing.models import ARCHITECTURES, tiny_module

LLAMA_LIKE = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
IDS = torch.arange(11) * 5 % 97


@pytest.fixture(autouse=True)
def _settings():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


class Subject:
    """A tiny model whose attention goes through the bridge."""

    def __init__(self, architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> None:
        bridge.register()
        self.parts: ModelParts = text_part(tiny_module(architecture, **overrides).to(dtype))
        self.trace: Trace = trace(self.parts.model, self.parts.logits, self.parts.config, 2048)

    @property
    def model(self) -> Any:
        return self.parts.model

    def using(self) -> Any:
        traced = self.trace
        return bridge.using(bridge.ReferenceContext(traced.layers, traced.index_of, traced.query_scales))

    def logits(self) -> torch.Tensor:
        with self.using():
            return self.parts.logits(IDS, torch.arange(len(IDS)))

    def fuse(self) -> list[str]:
        with self.using():
            return fuse(self.model)

    def stack(self) -> FusedStack | None:
        with self.using():
            return FusedStack.build(self.model)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_stay(architecture: str, dtype: torch.dtype) -> None:
    """Every architecture gives its own logits after all passes, rounded where transformers rounds."""
    subject = Subject(architecture, dtype)
    before = subject.logits()
    assert subject.fuse()
    assert relative_error(subject.logits(), before) < TOLERANCE[dtype]


@pytest.mark.parametrize("architecture", LLAMA_LIKE)
def test_llama_like_layers_are_fused_whole(architecture: str) -> None:
    """Biases, head norms, layers without rotation: all decoder layers, and then the stack."""
    subject = Subject(architecture)
    before = subject.logits()
    done = subject.fuse()
    layers = len(subject.parts.layers)
    assert f"{layers} decoder layers" in done
    stack = subject.stack()
    assert stack is not None
    with subject.using():
        logits, hidden, aux = stack(IDS, torch.arange(len(IDS)), torch.tensor([3, 10]))
    assert relative_error(logits, before[[3, 10]]) < 1e-5
    assert (hidden, aux) == (None, ())


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "olmo2", "exaone4"])
def test_other_layers_get_joint_projections(architecture: str) -> None:
    """Layers with more norms keep transformers' forward; its parts are replaced."""
    done = Subject(architecture).fuse()
    assert {"2 joint query/key/value projections", "2 joint gate/up projections"} <= set(done)
    assert not any("decoder layers" in what for what in done)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("ernie4_5", {}),  # rotates neighbouring dimensions
        ("granite", {"residual_multiplier": 0.5}),
        ("llama", {"hidden_act": "relu"}),
    ],
)
def test_a_layer_that_only_looks_like_llama_is_left(architecture: str, overrides: dict[str, Any]) -> None:
    """The parts are the same, the results are not: the comparison notices."""
    subject = Subject(architecture, **overrides)
    before = subject.logits()
    subject.fuse()
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in subject.parts.layers)
    assert subject.stack() is None
    assert relative_error(subject.logits(), before) < 1e-5


def test_a_stack_must_give_the_models_logits() -> None:
    """Fused layers, but something around them differs (scaled embeddings): no stack."""
    subject = Subject("granite", embedding_multiplier=3.0)
    assert "2 decoder layers" in subject.fuse()
    assert subject.stack() is None


def test_original_weights_are_freed() -> None:
    """Nothing keeps the replaced linears' weights, although attention modules are remembered by the trace."""
    subject = Subject("llama")
    weights = [weakref.ref(module.weight) for module in subject.model.modules() if isinstance(module, torch.nn.Linear)]
    subject.fuse()
    gc.collect()
    assert [ref for ref in weights if ref() is not None] == []


@pytest.mark.parametrize("architecture", ["smollm3", "gemma3"])
def test_tied_embeddings_share_the_packed_weight(architecture: str) -> None:
    """One copy serves embedding and logits; the table can be read back."""
    subject = Subject(architecture, tie_word_embeddings=True)
    before, table = subject.logits(), embedding_weight(subject.model).clone()
    subject.fuse()
    embedding, head = subject.model.get_input_embeddings(), subject.model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert isinstance(head, PackedLinear)
    assert embedding.packed is head.packed
    assert torch.equal(embedding_weight(subject.model), table)
    assert relative_error(subject.logits(), before) < 1e-5


def test_taps_are_the_layers_outputs() -> None:
    """Hidden states of chosen layers and of the last norm equal what the modules give."""
    subject = Subject("qwen3", num_hidden_layers=3)
    with subject.using():
        output = subject.model.model(IDS[None], position_ids=torch.arange(len(IDS))[None], output_hidden_states=True)
        subject.fuse()
        stack = subject.stack()
        assert stack is not None
        _, hidden, aux = stack(IDS, torch.arange(len(IDS)), torch.tensor([0]), hidden=True, taps=(1, 0))
    assert hidden is not None
    torch.testing.assert_close(hidden, output.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    for tapped, index in zip(aux, (2, 1), strict=True):
        torch.testing.assert_close(tapped, output.hidden_states[index][0], rtol=1e-4, atol=1e-4)


class TokenByToken(bridge.ReferenceContext):
    """Attention that takes one query at a time: torch's products of several round otherwise on some processors."""

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        found = []
        for end in range(1, len(query) + 1):
            padded = torch.cat([query[:1].expand(end - 1, -1, -1), query[end - 1 : end]])
            found.append(super().attend(layer_index, padded, key[:end], value[:end], sinks)[-1:])
        return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """The first tokens of a text get the same logits whatever follows them in the batch."""
    subject = Subject("llama", dtype)
    subject.fuse()
    stack = subject.stack()
    assert stack is not None
    rows = torch.arange(len(IDS))
    traced = subject.trace
    with bridge.using(TokenByToken(traced.layers, traced.index_of, traced.query_scales)):
        together, _, _ = stack(IDS, rows, rows)
        for count in (1, 6):
            alone, _, _ = stack(IDS[:count], rows[:count], rows[:count])
            assert torch.equal(alone, together[:count])


def test_long_texts_in_blocks_of_rows() -> None:
    """More tokens than one block of rows, and positions beyond the first rotary table."""
    subject = Subject("llama")
    ids, positions = torch.arange(700) % 512, torch.arange(700) + 1900
    with subject.using():
        want = subject.parts.logits(ids, positions)
        subject.fuse()
        stack = subject.stack()
        assert stack is not None
        logits, _, _ = stack(ids, positions, torch.arange(700))
    assert relative_error(logits, want) < 1e-5


def test_projections_called_apart_stay_right() -> None:
    """A module that gives its projections different inputs gets correct, if slower, results."""
    attention = tiny_module("gemma2").model.layers[0].self_attn
    x, y = torch.randn(1, 4, 64), torch.randn(1, 4, 64)
    want = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(x), attention.k_proj(x)]
    holder = torch.nn.ModuleList([attention])
    assert passes.join_projections(holder, TorchKit()) == 1
    got = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(x), attention.k_proj(x)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2", "olmo2"])
def test_torch_replacements(architecture: str) -> None:
    """Other devices and float16 get the same passes made of torch operations."""
    subject = Subject(architecture)
    before, kit = subject.logits(), TorchKit()
    assert passes.join_projections(subject.model, kit) == 2
    assert passes.fuse_gated_mlps(subject.model, kit) == 2
    assert passes.replace_norms(subject.model, kit) > 2
    assert passes.replace_linears(subject.model, kit) == 0
    assert any(isinstance(module, RmsNorm) for module in subject.model.modules())
    assert relative_error(subject.logits(), before) < 1e-5


def test_float16_on_the_cpu() -> None:
    """What the kernels do not compute in falls to torch operations."""
    subject = Subject("llama", torch.float16)
    before = subject.logits()
    done = subject.fuse()
    assert "2 joint query/key/value projections" in done
    assert relative_error(subject.logits(), before) < 5e-3


def test_the_global_random_state_is_left_alone() -> None:
    """Fusing draws its samples from a generator of its own."""
    subject = Subject("llama")
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    subject.fuse()
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_how_layers_are_called_is_learned_from_one(as_tuple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.target import llama_like

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, hidden: torch.Tensor, *, step: int) -> object:
            self.count += 1
            return (hidden + 1,) if as_tuple else hidden + 1

    layers = nn.ModuleList(Layer() for _ in range(3))
    last = layers[2].forward
    layers[2].forward = last  # an instance's own stays

    def forward() -> None:
        hidden = torch.zeros(1, 2, 4)
        for step, layer in enumerate(layers):
            hidden = layer(hidden, step=step)
            hidden = hidden[0] if as_tuple else hidden

    monkeypatch.setattr(llama_like, "_has_structure", lambda layer: True)
    calls = llama_like._calls(layers, forward)
    assert [calls[index][1] for index in range(3)] == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert [layer.count for layer in layers] == ([1, 1, 1] if as_tuple else [1, 0, 0])
    assert ["forward" in vars(layer) for layer in layers] == [False, False, True]
