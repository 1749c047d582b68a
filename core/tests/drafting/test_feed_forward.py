"""A mixture of experts computes what transformers' DeepSeek layers compute."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2DecoderLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from specdec.drafting.checkpoint import HeadCheckpoint
from specdec.drafting.feed_forward import Mixture, MixtureSizes, RouterRule, mixtures_of
from specdec.errors import ModelLoadError
from specdec.testing.heads import random_tensors, write_head

HIDDEN, INNER, EXPERTS, TARGET_LAYERS = 32, 16, 8, 4
CONFIG = {
    "hidden_size": HIDDEN,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": INNER,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def sizes_of(tmp_path, **changes) -> MixtureSizes:
    tensors = random_tensors({"norm.weight": (1,)})
    return MixtureSizes.of(HeadCheckpoint(write_head(tmp_path, CONFIG | changes, tensors)))


def tensors_of(sizes: MixtureSizes) -> dict[str, torch.Tensor]:
    """Scores far enough apart that no choice is a tie, and corrections that change some."""
    return random_tensors(sizes.shapes("mlp", HIDDEN), scale=0.3)


def theirs(tensors: dict[str, torch.Tensor], layer: torch.nn.Module) -> torch.nn.Module:
    """A layer of transformers' with these weights: its feed-forward part."""
    module = layer.mlp

    def stacked(part: str) -> torch.Tensor:
        return torch.stack([tensors[f"mlp.experts.{i}.{part}_proj.weight"] for i in range(EXPERTS)])

    state = {name.removeprefix("mlp."): t for name, t in tensors.items() if ".experts." not in name}
    state["experts.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], dim=1)
    state["experts.down_proj"] = stacked("down")
    module.load_state_dict(state, strict=True)
    return module.eval()


def check(sizes: MixtureSizes, layer: torch.nn.Module) -> None:
    """The same experts with the same weights, and the same output."""
    tensors = tensors_of(sizes)
    rows = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        module = theirs(tensors, layer)
        logits, weights, experts = module.gate(rows)
        correction = tensors.get("mlp.gate.e_score_correction_bias")
        own_experts, own_weights = sizes.rule.choose(logits, correction)
        assert torch.equal(own_experts.sort().values, experts.sort().values)
        torch.testing.assert_close(dense(own_experts, own_weights), dense(experts, weights))
        mixture = sizes.build(tensors, "mlp", "silu")
        torch.testing.assert_close(mixture(rows), module(rows[None])[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mixture(rows[:1]), module(rows[None, :1])[0], rtol=1e-5, atol=1e-5)


def dense(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, E]: the weight of every expert."""
    return torch.zeros(len(experts), EXPERTS).scatter(1, experts, weights)


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_group": 2, "topk_group": 1}, {"n_group": 1, "topk_group": 1}, {"norm_topk_prob": False}],
    ids=["4 groups", "2 groups", "1 group", "not normalised"],
)
def test_deepseek_v3(tmp_path, changes):
    config = DeepseekV3Config(**(CONFIG | changes))
    check(sizes_of(tmp_path, **changes), DeepseekV3DecoderLayer(config, 0))


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(tmp_path, method):
    """A softmax over the experts; groups count by their best one."""
    changes = {"scoring_func": "softmax", "topk_method": method, "norm_topk_prob": False}
    config = DeepseekV2Config(**(CONFIG | changes))
    check(sizes_of(tmp_path, **changes), DeepseekV2DecoderLayer(config, 0))


def test_experts_without_rows_do_not_run():
    ran: list[tuple[int, int]] = []

    def expert(index: int):
        return lambda rows: (ran.append((index, len(rows))), rows * index)[1]

    rule = RouterRule(scoring="softmax", method="greedy", num_chosen=2)
    rows = torch.tensor([[0.0, 9.0, 8.0, 0.0], [0.0, 9.0, 0.0, 8.0], [0.0, 8.0, 9.0, 0.0]])
    mixture = Mixture(rule, torch.nn.Identity(), None, [expert(i) for i in range(4)], None)
    mixture(rows)
    assert ran == [(1, 3), (2, 2), (3, 1)]


def test_routers_stay_in_float32():
    """What decides between experts is not rounded to the dtype of the rest."""
    from types import SimpleNamespace

    from specdec.drafting.modules import moved

    names = ("layers.0.mlp.gate.weight", "layers.0.mlp.gate.e_score_correction_bias", "layers.0.mlp.gate_proj.weight")
    target = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    dtypes = {name: t.dtype for name, t in moved(random_tensors(dict.fromkeys(names, (2, 2))), target).items()}
    assert dtypes == dict(zip(names, (torch.float32, torch.float32, torch.bfloat16), strict=True))


# --- which layers ---------------------------------------------------------------------------------------

ROUTED, DENSE = "mlp.gate.weight", "mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({}, (DENSE, DENSE), ["layers.0", "layers.1"]),
        ({"first_k_dense_replace": 9}, (ROUTED, ROUTED), []),
        ({"first_k_dense_replace": 1}, (ROUTED, DENSE), ["layers.0", "layers.1"]),
        ({"first_k_dense_replace": 1}, (DENSE, DENSE), ["layers.1"]),
        ({"moe_layer_freq": 2}, (DENSE, ROUTED), ["layers.0"]),
        ({"n_routed_experts": None}, (ROUTED, ROUTED), []),
    ],
    ids=["all", "none", "stored as a mixture", "stored dense", "every other", "no experts"],
)
def test_which_layers_are_mixtures(tmp_path, changes, stored, expected):
    """Layers are numbered from 0 or from the target's 4; where that matters, what is stored decides."""
    tensors = random_tensors({f"layers.{i}.{name}": (1,) for i, name in enumerate(stored)})
    checkpoint = HeadCheckpoint(write_head(tmp_path, CONFIG | changes, tensors))
    assert sorted(mixtures_of(checkpoint, TARGET_LAYERS)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": None}, "has no 'scoring_func'"),
        ({"topk_method": None}, "has no 'topk_method'"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh', heads know sigmoid, softmax"),
        ({"topk_method": "best"}, "topk_method is 'best', heads know noaux_tc, group_limited_greedy, greedy"),
        ({"n_group": 3}, "n_routed_experts is 8, n_group 3, topk_group 2: experts must fall into groups of one size"),
        ({"topk_group": 5}, "n_group 4, topk_group 5: the chosen groups are more than there are"),
        ({"topk_group": 1}, "num_experts_per_tok is 3, but the chosen groups hold 2 experts"),
        ({"topk_group": None}, "has no 'topk_group'"),
        ({"norm_topk_prob": None}, "has no 'norm_topk_prob'"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelLoadError, match=message):
        sizes_of(tmp_path, **changes)
