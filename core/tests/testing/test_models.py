"""Tiny checkpoints load like real ones, are the same every time, and exercise what they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.testing import ARCHITECTURES, set_eos, tiny_model, tiny_module, tiny_tokenizer

torch.set_num_threads(1)
TEXT = "Hello the 🙂 world,\n\tnaïve 你好 12"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoint_is_the_module(architecture: str, tmp_path: Path) -> None:
    """The directory gives the same logits as the module in memory, and its tokenizer stays within the vocabulary."""
    path = tiny_model(architecture, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    assert int(ids.max()) < loaded.config.vocab_size
    with torch.inference_mode():
        logits = loaded(ids).logits
        torch.testing.assert_close(logits, tiny_module(architecture)(ids).logits)
    assert 0.5 < float(logits.std()) < 3
    assert sum(file.stat().st_size for file in path.iterdir()) < 3e6


def test_seed_fixes_the_weights() -> None:
    """Same seed, same weights; the global random state is left alone."""
    state = torch.random.get_rng_state()
    first, again, other = tiny_module("llama"), tiny_module("llama"), tiny_module("llama", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_norms_and_biases_are_not_trivial() -> None:
    """A pass that forgets a norm's weight or a bias changes the logits."""
    model = tiny_module("qwen2")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert float(parameter.detach().std()) > 0.05, name


def test_overrides() -> None:
    """Sizes are the caller's to choose."""
    model = tiny_module("llama", vocab_size=32, hidden_size=32, num_hidden_layers=3, tie_word_embeddings=True)
    assert model.model.embed_tokens.weight.shape == (32, 32)
    assert len(model.model.layers) == 3


def test_unknown_architecture() -> None:
    """The name is transformers' to know."""
    with pytest.raises(ValueError, match="lama3"):
        tiny_module("lama3")


@pytest.mark.parametrize("vocab_size", [258, 300, 512, 800])
def test_byte_level_tokenizer(vocab_size: int) -> None:
    """From 258 ids on, every text survives encoding and decoding, and every id means something."""
    tokenizer = tiny_tokenizer(vocab_size)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer) == vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("vocab_size", [8, 32, 64])
def test_character_tokenizer(vocab_size: int) -> None:
    """Below, ids stay within the vocabulary and unknown characters become question marks."""
    tokenizer = tiny_tokenizer(vocab_size)
    ids = tokenizer.encode(TEXT)
    assert max(ids) < vocab_size
    assert len(tokenizer.decode(ids)) == len(TEXT)
    assert tokenizer.decode(tokenizer.encode("a tea")) == "a tea" or vocab_size == 8


def test_too_small_vocabulary() -> None:
    """There is a smallest one."""
    with pytest.raises(ValueError, match="vocab_size is 7"):
        tiny_tokenizer(7)


def test_chat_template() -> None:
    """Conversations can be rendered."""
    text = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "user: hi\nassistant: "


def test_set_eos(tmp_path: Path) -> None:
    """The end tokens of a written checkpoint can be changed."""
    path = tiny_model("llama", tmp_path)
    set_eos(path, [7, 9])
    for name in ("config.json", "generation_config.json"):
        assert json.loads((path / name).read_text())["eos_token_id"] == [7, 9]
