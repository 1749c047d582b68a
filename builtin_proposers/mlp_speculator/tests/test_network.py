"""MLP speculators: every layout loads, and gives what an independent straight-line program gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, write_head
from specdec.testing.models import tiny_module
from specdec_mlp_speculator.network import load_network

VOCAB, HIDDEN, INNER, STEPS = 64, 32, 20, 3
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": HIDDEN,
    "inner_dim": INNER,
    "n_predict": STEPS,
    "vocab_size": VOCAB,
    "top_k_tokens_per_head": [5, 4, 3],
    "tie_weights": False,
    "scale_input": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.from_model(tiny_module("llama", vocab_size=VOCAB, hidden_size=HIDDEN), name="tiny")


def shapes(step: int) -> dict[str, tuple[int, ...]]:
    return {
        f"emb.{step}.weight": (VOCAB, INNER),
        f"proj.{step}.weight": (INNER, INNER if step else HIDDEN),
        f"head.{step}.weight": (VOCAB, INNER),
        f"ln.{step}.weight": (INNER,),
        f"ln.{step}.bias": (INNER,),
    }


def tensors_of(steps: int = STEPS) -> dict[str, Tensor]:
    return random_tensors({name: shape for step in range(steps) for name, shape in shapes(step).items()})


def straight_line(w: dict[str, Tensor], f: Tensor, token: int, *, scaled: bool) -> list[tuple[int, Tensor]]:
    """Greedy tokens and logits from one hidden state, with weights named step by step."""

    def root_mean_square(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6)

    state = root_mean_square(f) / math.sqrt(2) if scaled else f
    a = 0.5 ** (0.5 / STEPS)
    b = math.sqrt(1 - a * a) * math.sqrt(INNER / 2)
    result = []
    for i in range(STEPS):
        state = a * (w[f"proj.{i}.weight"] @ state) + b * w[f"emb.{i}.weight"][token]
        state = root_mean_square(state) * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"]
        state = 0.5 * state * (1 + torch.erf(state / math.sqrt(2)))
        logits = w[f"head.{i}.weight"] @ state
        token = int(logits.argmax())
        result.append((token, logits))
    return result


def check(path, w: dict[str, Tensor], target: TargetModel, *, scaled: bool = False) -> None:
    network = load_network(path, target)
    generator = torch.Generator().manual_seed(2)
    hidden, tokens = torch.randn(4, HIDDEN, generator=generator), torch.randint(VOCAB, (4,), generator=generator)
    expected = [straight_line(w, f, int(token), scaled=scaled) for f, token in zip(hidden, tokens, strict=True)]
    states = network.begin(hidden)
    for i, step in enumerate(network.steps):
        states = step(states, tokens)
        logits = step.logits(states)
        torch.testing.assert_close(logits, torch.stack([run[i][1] for run in expected]), rtol=1e-4, atol=1e-4)
        tokens = logits.argmax(dim=-1)
        assert tokens.tolist() == [run[i][0] for run in expected]


@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_llama_layout(tmp_path, target, prefix):
    """Every step has weights of its own."""
    tensors = tensors_of()
    check(write_head(tmp_path, CONFIG, {prefix + name: t for name, t in tensors.items()}), tensors, target)


@pytest.mark.parametrize("repeated", [False, True])
def test_granite_layout(tmp_path, target, repeated):
    """Steps share weights, but for the first projection; the input is normalised. Files may repeat what is shared."""
    once = {name: t for name, t in tensors_of(2).items() if name.split(".")[1] == "0" or name.startswith("proj")}
    full = dict(once)
    for step in range(1, STEPS):
        for name in shapes(step):
            part, _, end = name.split(".")
            full[name] = once[f"{part}.{1 if part == 'proj' else 0}.{end}"].clone()
    path = write_head(tmp_path, CONFIG | {"tie_weights": True, "scale_input": True}, full if repeated else once)
    check(path, full, target, scaled=True)


def test_the_inner_width_is_the_targets_when_not_given(tmp_path, target):
    shape = {name: tuple(HIDDEN if n == INNER else n for n in shape) for name, shape in shapes(0).items()}
    path = write_head(tmp_path, CONFIG | {"inner_dim": 0, "n_predict": 1}, random_tensors(shape))
    assert len(load_network(path, target).steps) == 1


def test_misfits_are_named(tmp_path, target):
    tensors = tensors_of()
    del tensors["ln.2.bias"]
    tensors["head.3.weight"] = torch.zeros(1)
    with pytest.raises(ModelLoadError, match=r"missing: ln\.2\.bias; not part of the head: head\.3\.weight"):
        load_network(write_head(tmp_path / "a", CONFIG, tensors), target)
    with pytest.raises(PluginUnsuitableError, match="hidden size 64 where the target has 32"):
        load_network(write_head(tmp_path / "b", CONFIG | {"emb_dim": 64}, tensors_of()), target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 32000 where the target has 64"):
        load_network(write_head(tmp_path / "c", CONFIG | {"vocab_size": 32000}, tensors_of()), target)
