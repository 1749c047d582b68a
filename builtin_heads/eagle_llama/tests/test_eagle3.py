"""EAGLE-3 heads: every layout loads, and computes what an independent straight-line program computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import ModelLoadError, PluginUnsuitableError
from specdec.target import bridge
from specdec.target.model import TargetModel
from specdec.testing.heads import random_tensors, vocabulary_map, write_head
from specdec.testing.models import tiny_module
from specdec_eagle_llama.eagle3 import load_eagle3

VOCAB, DRAFT, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 96, 40, 32, 4, 2, 8, 48, 8
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    module = tiny_module(
        "llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return TargetModel.from_model(module, name="tiny")


def layer_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.input_layernorm.weight": (HIDDEN,),
        f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
    }


def tensors_of(first: str = "midlayer", **more: tuple[int, ...]) -> dict[str, Tensor]:
    """The authors' tensors; ``more`` adds or replaces shapes, names with dots as keys."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{first}.hidden_norm.weight": (HIDDEN,),
        **layer_shapes(first, 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT, HIDDEN),
        **more,
    }
    return random_tensors(shapes) | vocabulary_map(VOCAB, DRAFT)


# --- the straight-line program ------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[T, n, d], pairs (i, i + d / 2) turned by position / theta^(2 i / d)."""
    half = x.shape[-1] // 2
    frequencies = 5000.0 ** (-torch.arange(half).float() / half)
    angle = (positions.float()[:, None] * frequencies)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(w: dict[str, Tensor], name: str, x: Tensor, positions: Tensor) -> Tensor:
    def projected(part: str, heads: int) -> Tensor:
        y = F.linear(x, w[f"{name}.{part}_proj.weight"], w.get(f"{name}.{part}_proj.bias")).view(
            len(x), heads, HEAD_DIM
        )
        return norm(y, w[f"{name}.{part}_norm.weight"]) if f"{name}.{part}_norm.weight" in w else y

    q, k = (rotated(projected(part, n), positions) for part, n in (("q", HEADS), ("k", KV_HEADS)))
    v = projected("v", KV_HEADS)
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, shared].T / HEAD_DIM**0.5
        scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
        out.append(scores.softmax(-1) @ v[:, shared])
    return F.linear(torch.cat(out, -1), w[f"{name}.o_proj.weight"])


def feed_forward(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up = F.linear(x, w[f"{name}.gate_proj.weight"]), F.linear(x, w[f"{name}.up_proj.weight"])
    return F.linear(gate * torch.sigmoid(gate) * up, w[f"{name}.down_proj.weight"])


def straight_line(
    w: dict[str, Tensor], states: Tensor, embedded: Tensor, positions: Tensor, *, normed_residual: bool = False
) -> Tensor:
    """One pass over rows that all have the target's hidden states [T, 3 H], from weights named ``layers.N``."""
    g = F.linear(states, w["fc.weight"])
    e, u = norm(embedded, w["layers.0.input_layernorm.weight"]), norm(g, w["layers.0.hidden_norm.weight"])
    x = (u if normed_residual else g) + attention(w, "layers.0.self_attn", torch.cat([e, u], -1), positions)
    x = x + feed_forward(w, "layers.0.mlp", norm(x, w["layers.0.post_attention_layernorm.weight"]))
    if "layers.1.input_layernorm.weight" in w:
        x = x + attention(w, "layers.1.self_attn", norm(x, w["layers.1.input_layernorm.weight"]), positions)
        x = x + feed_forward(w, "layers.1.mlp", norm(x, w["layers.1.post_attention_layernorm.weight"]))
    return x


def run(head, states: tuple[Tensor, ...], token_ids: Tensor, positions: Tensor) -> Tensor:
    context = bridge.ReferenceContext(head.attention_layers, {}, head.query_scales, positions)
    with bridge.using(context), torch.inference_mode():
        return head.forward(token_ids, head.fuse(states), positions, 0)


def sample() -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    states = tuple(torch.randn(9, HIDDEN, generator=generator) for _ in range(3))
    return states, torch.randint(VOCAB, (9,), generator=generator), torch.arange(9) + 3


def check(head, tensors: dict[str, Tensor], target: TargetModel, **options: bool) -> Tensor:
    """Compare a pass; returns the straight-line program's output."""
    states, ids, positions = sample()
    w = {name.replace("midlayer.", "layers.0.").removeprefix("model."): tensor for name, tensor in tensors.items()}
    table = w.get("embed_tokens.weight", target.model.get_input_embeddings().weight)
    expected = straight_line(w, torch.cat(states, -1), table[ids], positions, **options)
    torch.testing.assert_close(run(head, states, ids, positions), expected, rtol=1e-4, atol=1e-4)
    return expected


# --- layouts --------------------------------------------------------------------------------------------


def test_authors_layout(tmp_path, target):
    """A pickled file, ``midlayer``, an output linear for the reduced vocabulary, the target's embeddings.

    Known bugs 56 and 61: the head's own output and its map to the target's ids are kept.
    """
    tensors = tensors_of()
    path = write_head(tmp_path, CONFIG, tensors, weights="pytorch_model.bin")
    head = load_eagle3(path, {}, target)
    expected = check(head, tensors, target)
    assert head.taps == (1, LAYERS // 2 - 1, LAYERS - 4)
    logits = F.linear(norm(expected, tensors["norm.weight"]), tensors["lm_head.weight"])
    torch.testing.assert_close(head.logits(expected), logits, rtol=1e-4, atol=1e-4)
    ids = head.to_target_ids(torch.arange(DRAFT))
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())


def test_output_rows_of_the_target(tmp_path, target):
    """Without an output linear, the rows of the target's that the draft vocabulary names."""
    tensors = tensors_of()
    del tensors["lm_head.weight"]
    head = load_eagle3(write_head(tmp_path, CONFIG, tensors), {}, target)
    hidden = torch.randn(3, HIDDEN)
    rows = target.model.get_output_embeddings().weight[tensors["t2d"]]
    torch.testing.assert_close(head.logits(hidden), F.linear(norm(hidden, tensors["norm.weight"]), rows))


def test_full_vocabulary_shares_the_targets_output(tmp_path, target):
    tensors = tensors_of()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    head = load_eagle3(write_head(tmp_path, CONFIG | {"draft_vocab_size": None}, tensors), {}, target)
    hidden = torch.randn(3, HIDDEN)
    table = target.model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(hidden), F.linear(norm(hidden, tensors["norm.weight"]), table))
    assert head.target_ids is None
    assert head.draft_vocab_size == VOCAB


def speculators_config(kind: str, architecture: str) -> dict[str, Any]:
    layer_keys = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    layer_keys += ("head_dim", "rms_norm_eps", "rope_theta", "vocab_size")
    return {
        "speculators_model_type": kind,
        "architectures": [architecture],
        "draft_vocab_size": DRAFT,
        "transformer_layer_config": {key: CONFIG[key] for key in layer_keys},
    }


@pytest.mark.parametrize("normed_residual", [False, True])
def test_speculators_layout(tmp_path, target, normed_residual):
    """Nested configuration, ``layers.0``, own embeddings; the residual is normed unless the configuration says no."""
    config = speculators_config("eagle3", "Eagle3Speculator")
    if not normed_residual:
        config["norm_before_residual"] = False
    tensors = tensors_of("layers.0", **{"embed_tokens.weight": (VOCAB, HIDDEN)})
    check(
        load_eagle3(write_head(tmp_path, config, tensors), {}, target), tensors, target, normed_residual=normed_residual
    )


def test_qwen3_layers_biases_and_two_layers(tmp_path, target):
    """Norms of query and key heads, biases, a second layer; its unused hidden norm is let pass."""
    name = "layers.0.self_attn"
    more = layer_shapes("layers.1", HIDDEN) | {"layers.1.hidden_norm.weight": (HIDDEN,)}
    more |= {f"{name}.q_norm.weight": (HEAD_DIM,), f"{name}.k_norm.weight": (HEAD_DIM,)}
    more |= {f"{name}.q_proj.bias": (HEADS * HEAD_DIM,), f"{name}.v_proj.bias": (KV_HEADS * HEAD_DIM,)}
    tensors = tensors_of("layers.0", **more)
    check(load_eagle3(write_head(tmp_path, CONFIG | {"model_type": "qwen3"}, tensors), {}, target), tensors, target)


def test_norms_before_the_fusion(tmp_path, target):
    """One norm over all hidden states, or one for each; with the latter the normed output may be fed back."""
    states, ids, positions = sample()
    for config, more in (
        ({"eagle_config": {"norm_before_fc": True}}, {"input_norm.weight": (3 * HIDDEN,)}),
        ({"fc_norm": True, "norm_output": True}, {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}),
    ):
        tensors = tensors_of(**more)
        head = load_eagle3(write_head(tmp_path, CONFIG | config, tensors), {}, target)
        w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        if "fc_norm" in config:
            normed = torch.cat([norm(s, w[f"fc_norm.{i}.weight"]) for i, s in enumerate(states)], -1)
        else:
            normed = norm(torch.cat(states, -1), w["input_norm.weight"])
        embedded = target.model.get_input_embeddings().weight[ids]
        expected = straight_line(w, normed, embedded, positions)
        logits = F.linear(norm(expected, w["norm.weight"]), w["lm_head.weight"])
        if "fc_norm" in config:
            expected = norm(expected, w["norm.weight"])
        found = run(head, states, ids, positions)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(found), logits, rtol=1e-4, atol=1e-4)


def test_final_hidden_states_alone(tmp_path, target):
    """``use_aux_hidden_state = false``: no fusion, the final hidden states go into the layer."""
    tensors = tensors_of()
    del tensors["fc.weight"]
    config = CONFIG | {"eagle_config": {"use_aux_hidden_state": False}}
    head = load_eagle3(write_head(tmp_path, config, tensors), {}, target)
    states, ids, positions = sample()
    w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()} | {
        "fc.weight": torch.eye(HIDDEN)
    }
    expected = straight_line(w, states[0], target.model.get_input_embeddings().weight[ids], positions)
    assert head.taps == ()
    torch.testing.assert_close(run(head, states[:1], ids, positions), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 8]}, (0, 2, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}, (1, 3, 5)),
        ({"target_layer_ids": [0, 3, 7]}, (0, 3, 7)),
    ],
)
def test_which_layers_are_read(tmp_path, target, config, taps):
    """Ids of EAGLE count boundaries, ``target_layer_ids`` layers; hidden states are joined in ascending order."""
    assert load_eagle3(write_head(tmp_path, CONFIG | config, tensors_of()), {}, target).taps == taps


def test_configuration_can_be_overridden(tmp_path, target):
    path = write_head(tmp_path, CONFIG, tensors_of())
    assert load_eagle3(path, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, target).taps == (0, 1, 2)


# --- drafting in parallel (P-EAGLE) -----------------------------------------------------------------------

OWN_EMBEDDINGS = {"embed_tokens.weight": (VOCAB, HIDDEN)}
MASK = {"mask_hidden": (1, 1, 3 * HIDDEN)}
PEAGLE = speculators_config("peagle", "PEagleDraftModel")


@pytest.mark.parametrize(
    "config",
    [
        PEAGLE | {"mask_token_id": 5},
        CONFIG | {"parallel_drafting": True, "ptd_token_id": 5},
        CONFIG | {"pard_token": 5},
    ],
    ids=["speculators", "flag", "tensor alone"],
)
def test_heads_that_draft_in_parallel(tmp_path, target, config):
    """An EAGLE-3 head whose residual is not normed, with a mask id and the mask's hidden states."""
    tensors = tensors_of("layers.0", **OWN_EMBEDDINGS, **MASK)
    path = write_head(tmp_path, config, tensors)
    head = load_eagle3(path, {}, target)
    check(head, tensors, target)
    assert head.mask_row.token_id == 5
    expected = F.linear(tensors["mask_hidden"].view(1, -1), tensors["fc.weight"])
    torch.testing.assert_close(head.fuse(head.mask_row.hidden_states), expected, rtol=1e-4, atol=1e-4)
    assert load_eagle3(path, {"parallel_drafting": False}, target).mask_row is None


def test_the_mask_goes_through_the_norms_before_the_fusion(tmp_path, target):
    """Its hidden states may be stored flat."""
    norms = {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    tensors = tensors_of("layers.0", mask_hidden=(3 * HIDDEN,), **norms)
    head = load_eagle3(write_head(tmp_path, CONFIG | {"fc_norm": True, "pard_token": 5}, tensors), {}, target)
    states = tensors["mask_hidden"].view(3, 1, HIDDEN)
    normed = torch.cat([norm(state, tensors[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)], -1)
    expected = F.linear(normed, tensors["fc.weight"])
    torch.testing.assert_close(head.fuse(head.mask_row.hidden_states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        (PEAGLE, MASK, r"has no mask token id in its configuration \(pard_token, ptd_token_id, mask_token_id\);"),
        (PEAGLE | {"mask_token_id": 5}, {}, r"it has no tensor 'mask_hidden';"),
        (CONFIG | {"parallel_drafting": True}, {}, r"no mask token id .* and no tensor 'mask_hidden';"),
        (PEAGLE | {"mask_token_id": VOCAB}, MASK, f"mask token id {VOCAB} .* outside the vocabulary of {VOCAB} ids"),
        (
            PEAGLE | {"mask_token_id": 5},
            {"mask_hidden": (1, 1, 2 * HIDDEN)},
            rf"mask_hidden \[1, 1, {2 * HIDDEN}\] instead of \[1, 1, {3 * HIDDEN}\]",
        ),
    ],
    ids=["no id", "no tensor", "neither", "no token", "width"],
)
def test_what_a_head_lacks_to_draft_in_parallel_is_named(tmp_path, target, config, shapes, expected):
    path = write_head(tmp_path, config, tensors_of("layers.0", **OWN_EMBEDDINGS, **shapes))
    with pytest.raises(ModelLoadError, match=expected):
        load_eagle3(path, {}, target)


# --- refusals -------------------------------------------------------------------------------------------


def test_misfitting_tensors_are_named(tmp_path, target):
    tensors = tensors_of()
    del tensors["midlayer.hidden_norm.weight"]
    tensors["midlayer.surplus.weight"] = torch.zeros(2)
    tensors["norm.weight"] = torch.zeros(7)
    with pytest.raises(ModelLoadError) as raised:
        load_eagle3(write_head(tmp_path, CONFIG, tensors), {}, target)
    text = str(raised.value)
    assert "missing: layers.0.hidden_norm.weight" in text
    assert "not part of the head: layers.0.surplus.weight" in text
    assert "norm.weight [7] instead of [32]" in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"target_hidden_size": 64}, "hidden size 64 where the target has 32"),
        ({"vocab_size": 100}, "vocabulary 100 where the target has 96"),
    ],
)
def test_another_target_is_refused_with_both_numbers(tmp_path, target, config, expected):
    with pytest.raises(PluginUnsuitableError, match=expected):
        load_eagle3(write_head(tmp_path, CONFIG | config, tensors_of()), {}, target)


def test_a_wrong_vocabulary_map_is_refused(tmp_path, target):
    """Known bug 56: no start with an acceptance of nothing."""
    tensors = tensors_of()
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT)
    with pytest.raises(ModelLoadError, match="'d2t' does not hold ascending offsets"):
        load_eagle3(write_head(tmp_path, CONFIG, tensors), {}, target)
    tensors = tensors_of()
    tensors["t2d"] = tensors["t2d"].roll(1)
    with pytest.raises(ModelLoadError, match="'t2d' marks other tokens"):
        load_eagle3(write_head(tmp_path, CONFIG, tensors), {}, target)
    del tensors["d2t"]
    with pytest.raises(ModelLoadError, match=r"40 tokens, the target's 96.*'d2t'"):
        load_eagle3(write_head(tmp_path, CONFIG, tensors), {}, target)


def test_layers_the_target_lacks_are_refused(tmp_path, target):
    """Known bug 62."""
    config = CONFIG | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}
    with pytest.raises(ModelLoadError, match=r"names the target's layers \[2, 4, 9\].*between 1 and 8"):
        load_eagle3(write_head(tmp_path, config, tensors_of()), {}, target)
