"""Medusa heads: every layout loads, and gives what an independent straight-line program gives."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import ConfigError, ModelLoadError, PluginUnsuitableError
from specdec.target.model import TargetModel
from specdec.testing import engine_context
from specdec.testing.heads import random_tensors, vocabulary_map, write_head
from specdec.testing.models import tiny_module
from specdec_medusa.config import MedusaConfig
from specdec_medusa.heads import load_heads
from specdec_medusa.medusa import build
from specdec_medusa.published import PUBLISHED, published_tree

VOCAB, HIDDEN, DRAFT = 64, 32, 20


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.from_model(tiny_module("llama", vocab_size=VOCAB, hidden_size=HIDDEN), name="tiny")


def authors(heads: int = 3, blocks: int = 1, outputs: bool = True) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(blocks):
            shapes |= {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": (HIDDEN,)}
        if outputs:
            shapes[f"{i}.{blocks}.weight"] = (VOCAB, HIDDEN)
    return random_tensors(shapes)


def straight_line(tensors: dict[str, Tensor], f: Tensor, head: int, blocks: int, output: Tensor) -> Tensor:
    x = f
    for j in range(blocks):
        y = F.linear(x, tensors[f"{head}.{j}.linear.weight"], tensors.get(f"{head}.{j}.linear.bias"))
        x = x + y * torch.sigmoid(y)
    return F.linear(x, output)


def check(path, tensors: dict[str, Tensor], target: TargetModel, outputs: list[Tensor], blocks: int = 1):
    """Load, compare the logits of all heads with the program over the authors' names; returns the heads."""
    heads, _ = load_heads(path, target)
    assert len(heads) == len(outputs)
    f = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for i, found in enumerate(heads.logits(f, len(outputs))):
        expected = straight_line(tensors, f, i, blocks, outputs[i])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return heads


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_authors_layout(tmp_path, target, blocks, file):
    """How many heads there are the tensors say, whatever the configuration claims."""
    tensors = authors(blocks=blocks)
    config = {"medusa_num_heads": 2, "medusa_num_layers": blocks}
    outputs = [tensors[f"{i}.{blocks}.weight"] for i in range(3)]
    check(write_head(tmp_path, config, tensors, weights=file), tensors, target, outputs, blocks)


def test_heads_beside_the_targets_own_tensors(tmp_path, target):
    tensors = authors()
    stored = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    stored |= {"lm_head.weight": torch.zeros(VOCAB, HIDDEN), "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    path = write_head(tmp_path, {"model_type": "llama", "medusa_num_heads": 3, "vocab_size": VOCAB}, stored)
    check(path, tensors, target, [tensors[f"{i}.1.weight"] for i in range(3)])


def test_without_output_linears_the_targets_is_used(tmp_path, target):
    tensors = authors(outputs=False)
    path = write_head(tmp_path, {"medusa_num_heads": 3}, tensors, weights="medusa_lm_head.pt")
    check(path, tensors, target, [target.model.get_output_embeddings().weight] * 3)


def vllm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {re.sub(r"(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name): t for name, t in tensors.items()}
    return {re.sub(r"^(\d+)\.\d+\.weight", r"lm_heads.\1.weight", name): t for name, t in renamed.items()}


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_layout(tmp_path, target, prefix):
    tensors = authors()
    stored = {prefix + name: tensor for name, tensor in vllm_names(tensors).items()}
    path = write_head(tmp_path, {"model_type": "medusa", "architectures": ["MedusaModel"], "vocab_size": VOCAB}, stored)
    check(path, tensors, target, [tensors[f"{i}.1.weight"] for i in range(3)])


@pytest.mark.parametrize("mapped", ["d2t", "token_map", "rows of the target"])
def test_one_output_for_all_and_a_reduced_vocabulary(tmp_path, target, mapped):
    tensors = authors(outputs=False)
    maps = vocabulary_map(VOCAB, DRAFT)
    ids = maps["t2d"].nonzero().flatten()
    output = random_tensors({"lm_head.weight": (DRAFT, HIDDEN)})
    stored = {**vllm_names(tensors), **output, "d2t": maps["d2t"]}
    if mapped == "token_map":  # in any order
        ids = ids.flip(0)
        stored = {**vllm_names(tensors), **output, "token_map": ids}
    if mapped == "rows of the target":
        output["lm_head.weight"] = target.model.get_output_embeddings().weight[ids]
        stored = {**vllm_names(tensors), "d2t": maps["d2t"]}
    path = write_head(tmp_path, {"model_type": "medusa"}, stored)
    heads = check(path, tensors, target, [output["lm_head.weight"]] * 3)
    assert torch.equal(heads.to_target_ids(torch.arange(DRAFT)), ids)


def test_misfits_are_named(tmp_path, target):
    tensors = authors()
    del tensors["1.0.linear.weight"]
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(ModelLoadError, match=r"missing: blocks\.1\.0\.weight; not part of the head: extra"):
        load_heads(write_head(tmp_path / "a", {}, tensors, weights="medusa_lm_head.pt"), target)
    other = random_tensors({"0.0.linear.weight": (16, 16), "0.1.weight": (VOCAB, 16)})
    with pytest.raises(PluginUnsuitableError, match="hidden size 16 where the target has 32"):
        load_heads(write_head(tmp_path / "b", {}, other, weights="medusa_lm_head.pt"), target)
    with pytest.raises(PluginUnsuitableError, match="vocabulary 65 where the target has 64"):
        load_heads(write_head(tmp_path / "c", {"vocab_size": 65}, authors()), target)
    with pytest.raises(ModelLoadError, match="holds no Medusa heads"):
        load_heads(write_head(tmp_path / "d", {}, {"weight": torch.zeros(2)}), target)


# --- trees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees(name):
    """63 nodes each, complete; the configuration takes their names."""
    tree = published_tree(name)
    assert len(tree) == len(set(tree)) == 63
    assert MedusaConfig(model="x", speculative_token_tree=name).static_tree == tree


def test_published_trees_have_their_levels():
    counts = [sum(len(path) == depth for path in published_tree("vicuna_7b_stage2")) for depth in (1, 2, 3, 4)]
    assert counts == [10, 23, 23, 7]


def test_a_tree_larger_than_a_draft_is_refused(tmp_path, target):
    path = write_head(tmp_path, {}, authors(), weights="medusa_lm_head.pt")
    config = MedusaConfig(model=str(path), speculative_token_tree="mc_sim_7b_63")
    with pytest.raises(ConfigError, match="61 nodes, more than speculative.num_speculative_tokens, 4: set that to 61"):
        build(
            config, engine_context(num_speculative_tokens=4, target=target)
        )  # the two nodes of the fourth head are left out


def test_an_unknown_tree_is_refused():
    with pytest.raises(ConfigError, match="must be one of mc_sim_7b_63, .* Did you mean 'vicuna_7b_stage1'"):
        MedusaConfig(model="x", speculative_token_tree="vicuna_7b_stage_1")
