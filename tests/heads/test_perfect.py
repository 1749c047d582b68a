"""Heads built by hand for a target whose next token is a function of the last: every draft token is accepted.

The target's embeddings are unit vectors, its layers add nothing and its output linear is a permutation, so greedy text
walks along the cycles of the permutation. Heads that know the permutation predict it exactly.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import SamplingParams
from specdec.testing import tiny_model
from specdec.testing.heads import layer_shapes, random_tensors, write_head

SIZE = 64
HALF = SIZE // 2
GREEDY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
PROMPTS = [[3, 9, 5], [2], [7, 7, 7, 8, 1]]
LAYER = {
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": SIZE,
}


def successor(power: int = 1) -> Tensor:
    """[V, V] with a 1 in row F(x) of column x: logits of the token ``power`` steps behind x.

    Halves of the ids stay apart.
    """
    ids = torch.cat([torch.arange(HALF).roll(-5), torch.arange(HALF, SIZE).roll(-3)])
    step = torch.zeros(SIZE, SIZE)
    step[ids, torch.arange(SIZE)] = 1.0
    return torch.linalg.matrix_power(step, power)


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the target."""
    path = tmp_path_factory.mktemp("walker")
    tiny_model(
        "llama",
        path,
        vocab_size=SIZE,
        hidden_size=SIZE,
        num_hidden_layers=4,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights |= {"model.embed_tokens.weight": torch.eye(SIZE), "lm_head.weight": successor()}
    weights["model.norm.weight"] = torch.ones(SIZE)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return str(path)


def eagle(path: Path) -> Path:
    """Takes the embedding of the token behind the row, and nothing else; the target's output linear does the rest."""
    tensors = random_tensors(layer_shapes(LAYER, "layers.0"))
    tensors = {name: t * 0 if "o_proj" in name or "down_proj" in name else t for name, t in tensors.items()}
    tensors["fc.weight"] = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], dim=1)
    return write_head(path, LAYER, tensors)


def eagle3(path: Path, *, reduced: bool = False) -> Path:
    """Takes the token of the row from the first hidden state; its feed-forward part steps to the next."""
    shapes = layer_shapes(LAYER | {"intermediate_size": SIZE}, "midlayer", 2 * SIZE)
    names = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
    tensors = random_tensors(shapes | dict.fromkeys(names, (SIZE,)))
    tensors["midlayer.self_attn.o_proj.weight"] *= 0
    tensors["fc.weight"] = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, 2 * SIZE)], dim=1)
    tensors["midlayer.post_attention_layernorm.weight"] = torch.ones(SIZE)
    tensors["norm.weight"] = torch.ones(SIZE)
    gate = SIZE**0.5 * 4.0  # a unit vector leaves the norm with length 8; silu(8 * 4) is 32 but for rounding
    tensors["midlayer.mlp.gate_proj.weight"] = 4.0 * torch.eye(SIZE)
    tensors["midlayer.mlp.up_proj.weight"] = torch.eye(SIZE)
    tensors["midlayer.mlp.down_proj.weight"] = (successor() - torch.eye(SIZE)) / (gate * SIZE**0.5)
    config = LAYER | {"intermediate_size": SIZE, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    if reduced:
        config["draft_vocab_size"] = HALF
        tensors |= {"d2t": torch.zeros(HALF, dtype=torch.int64), "t2d": torch.arange(SIZE) < HALF}
    return write_head(path, config, tensors)


def eagle3_reduced(path: Path) -> Path:
    """The lower half of the ids alone, with the target's rows as output linear."""
    return eagle3(path, reduced=True)


def medusa(path: Path) -> Path:
    """Heads that add nothing; each output linear steps as far as it must."""
    tensors: dict[str, Tensor] = {}
    for i in range(3):
        tensors |= {f"{i}.0.linear.weight": torch.zeros(SIZE, SIZE), f"{i}.0.linear.bias": torch.zeros(SIZE)}
        tensors[f"{i}.1.weight"] = successor(2 + i)
    return write_head(path, {"medusa_num_heads": 3, "medusa_num_layers": 1}, tensors, weights="medusa_lm_head.pt")


def mlp_speculator(path: Path) -> Path:
    """Forgets the state, and steps from the embedding of the token."""
    tensors: dict[str, Tensor] = {}
    for i in range(3):
        tensors |= {
            f"emb.{i}.weight": torch.eye(SIZE),
            f"proj.{i}.weight": torch.zeros(SIZE, SIZE),
            f"head.{i}.weight": successor(),
            f"ln.{i}.weight": torch.ones(SIZE),
            f"ln.{i}.bias": torch.zeros(SIZE),
        }
    config = {"model_type": "mlp_speculator", "emb_dim": SIZE, "inner_dim": SIZE, "n_predict": 3, "vocab_size": SIZE}
    return write_head(path, config, tensors)


HEADS = {f.__name__: f for f in (eagle, eagle3, eagle3_reduced, medusa, mlp_speculator)}


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_every_draft_token_is_accepted(start, walker, tmp_path, name, tree):
    """Chains are accepted whole; of trees one path to the last level."""
    options = {"num_speculative_tokens": 3}
    if tree:
        options = {"num_speculative_tokens": 5, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"}
    method = name.split("_reduced")[0]
    engine = start({"method": method, "model": str(HEADS[name](tmp_path / "head")), **options}, target=walker)
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    step = successor()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text = [prompt[-1], *output.outputs[0].token_ids]
        assert all(step[:, a].argmax() == b for a, b in itertools.pairwise(text))
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if not tree:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    # 25 tokens: one by prefill, then 4 by each step of each of the 3 requests; the last tree has more nodes than tokens
    # are left.
    assert stats.num_drafts == 3 * 6
    assert stats.num_accepted_tokens_per_pos == (18, 18, 18)
    assert stats.num_draft_tokens_per_pos == ((36, 36, 18) if tree else (18, 18, 18))
    assert outputs[0].spec_stats.num_draft_tokens_per_pos == ((12, 12, 6) if tree else (6, 6, 6))
