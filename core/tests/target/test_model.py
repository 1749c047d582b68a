from __future__ import annotations

import gc
import json
import resource
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from specdec.attention.sdpa import SdpaBackend
from specdec.errors import ModelNotFoundError, UnsupportedModelError
from specdec.target.model import TargetModel, load_target, max_position_embeddings
from specdec.testing import set_eos, tiny_model, tiny_module
from specdec.types import Needs, PackedBatch

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def settings(model, **changes):
    """What `load_target` reads of an engine configuration."""
    values = {"device": "cpu", "dtype": "float32", "cache_dir": None, "trust_remote_code": False, "tokenizer": None}
    return SimpleNamespace(**{**values, "fuse": True, "model": str(model), **changes})


def one_prompt(tokens, rows=None):
    """A batch of one prompt in the first blocks."""
    count = len(tokens)
    return PackedBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        slot_mapping=torch.arange(count),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(8, dtype=torch.int32)[None],
        logits_indices=torch.arange(count) if rows is None else torch.tensor(rows, dtype=torch.int64),
        max_query_len=count,
        max_seq_len=count,
    )


def run(target, batch, needs=None):
    target.bind(SdpaBackend(), target.allocate_kv_cache(8, 16), needs or Needs())
    return target.forward(batch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def test_load_target(path):
    target = load_target(settings(path))
    info = target.info
    assert (info.model, info.model_type, info.path) == (str(path), "llama", path)
    assert (info.vocab_size, info.hidden_size, info.num_layers, info.max_position_embeddings) == (512, 64, 2, 2048)
    assert info.eos_token_ids == (1,)
    assert target.tokenizer is not None
    assert (target.device.type, target.dtype) == ("cpu", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path)
    with torch.inference_mode():
        expected = plain(torch.tensor([[5, 9, 200]]), use_cache=False).logits[0]
    torch.testing.assert_close(run(target, one_prompt([5, 9, 200])).logits, expected, atol=1e-4, rtol=1e-4)


def test_load_target_of_an_unknown_model():
    with pytest.raises(ModelNotFoundError, match=r"no file or directory './nothing'"):
        load_target(settings("./nothing"))


def test_eos_ids_come_from_all_files(tmp_path):
    path = tiny_model("llama", tmp_path / "model")
    set_eos(path, [7, 9])
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 4}))
    ids = load_target(settings(path)).info.eos_token_ids
    assert {4, 7, 9} <= set(ids)


def test_requirements_and_cache():
    target = TargetModel.from_model(tiny_module("deepseek_v3"), name="m", fuse=False)
    requirements = target.requirements(16, trees=True)
    assert (requirements.dtype, requirements.device, requirements.block_size, requirements.trees) == (
        "float32",
        "cpu",
        16,
        True,
    )
    assert [(layer.head_dim, layer.v_head_dim, layer.num_kv_heads) for layer in requirements.layers] == [
        (24, 12, 4)
    ] * 2
    assert target.kv_bytes_per_token() == 4 * 2 * 4 * (24 + 12)
    cache = target.allocate_kv_cache(3, 16)
    assert [(tuple(kv.keys.shape), tuple(kv.values.shape)) for kv in cache.layers] == [((48, 4, 24), (48, 4, 12))] * 2
    assert not any(kv.keys.any() or kv.values.any() for kv in cache.layers)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unused_cache_takes_no_memory(dtype):
    target = TargetModel.from_model(tiny_module("llama").to(dtype), name="m", fuse=False)
    before = resident_bytes()
    cache = target.allocate_kv_cache(2**20 // 16, 16)
    assert cache.layers[0].keys.dtype == dtype
    assert sum(kv.keys.nbytes + kv.values.nbytes for kv in cache.layers) >= 2**28
    assert resident_bytes() - before < 2**24


def test_forward_before_bind():
    target = TargetModel.from_model(tiny_module("llama"), name="m", fuse=False)
    with pytest.raises(RuntimeError, match="before bind"):
        target.forward(one_prompt([1]))


@pytest.mark.parametrize("fuse", [False, True])
def test_rows_and_taps(fuse):
    target = TargetModel.from_model(tiny_module("llama"), name="m", fuse=fuse)
    batch = one_prompt([3, 4, 5, 6], rows=[3, 1])
    everything = run(target, batch, Needs(hidden_states=True, aux_layers=(1, 0, 1)))
    plain = run(target, batch)
    assert plain.hidden_states is None
    assert plain.aux_hidden_states is None
    assert plain.logits.shape == (2, 512)
    torch.testing.assert_close(plain.logits, everything.logits)
    assert everything.hidden_states.shape == (4, 64)
    assert torch.equal(everything.aux_hidden_states[0], everything.aux_hidden_states[2])
    assert not torch.equal(everything.aux_hidden_states[0], everything.aux_hidden_states[1])
    assert not target._parts.layers[0]._forward_hooks, "taps stay after they are no longer needed"


def test_a_step_without_rows():
    """A prefill chunk in the middle of a prompt has no logits."""
    target = TargetModel.from_model(tiny_module("llama"), name="m")
    assert run(target, one_prompt([3, 4, 5], rows=[])).logits.shape == (0, 512)


def test_taps_of_layers_that_do_not_exist():
    target = TargetModel.from_model(tiny_module("llama"), name="m", fuse=False)
    with pytest.raises(UnsupportedModelError, match="it has layers 0 to 1, but hidden states of 2, -1 were asked for"):
        run(target, one_prompt([1]), Needs(aux_layers=(0, 2, -1)))


def test_wrong_fusion_is_refused(monkeypatch):
    """Passes check themselves; a fault they miss does not reach the output."""
    import specdec.target.fusion as fusion

    def spoil(model):
        model.lm_head.weight.data[3:] *= 1.5
        return ["a faulty pass"]

    monkeypatch.setattr(fusion, "fuse", spoil)
    with pytest.raises(UnsupportedModelError, match=r"fused modules give other results.*set fuse = false"):
        TargetModel.from_model(tiny_module("qwen2"), name="m", fuse=True)


def test_max_position_embeddings():
    assert max_position_embeddings(SimpleNamespace(max_position_embeddings=77)) == 77
    assert max_position_embeddings(SimpleNamespace(n_positions=12)) == 12
    assert max_position_embeddings(SimpleNamespace()) == 1 << 20


# --- multimodal models --------------------------------------------------------------------------


def multimodal(name, auto_class=AutoModelForImageTextToText, **changes):
    config = AutoConfig.for_model(name, **changes)
    torch.manual_seed(0)
    return auto_class.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def gemma3():
    layer_types = ["sliding_attention", "full_attention"]
    text = {**TEXT, "sliding_window": 8, "layer_types": layer_types, "query_pre_attn_scalar": 16}
    return multimodal("gemma3", AutoModelForCausalLM, text_config=text, vision_config=VISION, mm_tokens_per_image=4)


def llava():
    vision = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
    return multimodal("llava", text_config={"model_type": "qwen2", **TEXT}, vision_config=vision)


def qwen_vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return multimodal("qwen2_5_vl", text_config={**TEXT, "rope_parameters": rope}, vision_config=vision)


@pytest.mark.parametrize("make", [gemma3, llava, qwen_vl])
@pytest.mark.parametrize("fuse", [False, True])
def test_the_text_part_of_multimodal_models(make, fuse):
    plain, model = make(), make()
    tower = weakref.ref(next(m for n, m in model.named_modules() if n.split(".")[-1] in ("vision_tower", "visual")))
    target = TargetModel.from_model(model, name="m", fuse=fuse)
    del model
    gc.collect()
    assert tower() is None, "the vision tower is still in memory"
    tokens = np.random.default_rng(0).integers(5, 100, 40).tolist()
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(run(target, one_prompt(tokens)).logits, expected, atol=1e-4, rtol=1e-4)
    assert target.info.vocab_size == 128
    assert target.info.model_type == plain.config.get_text_config().model_type


def test_multimodal_checkpoints_load(tmp_path):
    llava().save_pretrained(tmp_path)
    target = load_target(settings(tmp_path))
    assert target.info.model_type == "qwen2"
    assert target.tokenizer is None


# --- the demonstration model --------------------------------------------------------------------

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, a small robot"]


@pytest.mark.slow
@pytest.mark.model
def test_demonstration_model_equals_generate(monkeypatch):
    """Greedy tokens in float32 over fused layers and the paged cache; the conversion is kept in the user's cache."""
    monkeypatch.delenv("SPECDEC_CACHE")
    target = load_target(settings("demo:smollm2"))
    plain = AutoModelForCausalLM.from_pretrained(target.info.path, dtype=torch.float32)
    assert target.info.eos_token_ids == (2,)
    assert target.tokenizer.chat_template
    for prompt in PROMPTS:
        ids = target.tokenizer(prompt)["input_ids"]
        expected = plain.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        tokens, start = list(ids), 0
        target.bind(SdpaBackend(), target.allocate_kv_cache(8, 16), Needs())
        while len(tokens) < len(ids) + 24:
            batch = one_prompt(tokens)
            step = PackedBatch(
                input_ids=batch.input_ids[start:],
                positions=batch.positions[start:],
                slot_mapping=batch.slot_mapping[start:],
                query_start_loc=torch.tensor([0, len(tokens) - start], dtype=torch.int32),
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                logits_indices=torch.tensor([len(tokens) - start - 1]),
                max_query_len=len(tokens) - start,
                max_seq_len=len(tokens),
            )
            start = len(tokens)
            tokens.append(int(target.forward(step).logits.argmax()))
        assert tokens == expected[0].tolist()
