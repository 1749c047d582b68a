"""Ids of target and drafter: equal tokenizers, different widths, different tokenizers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from specdec.errors import ConfigError
from specdec.testing import tiny_tokenizer
from specdec_draft_model.vocabulary import check_same_tokens, same_ids, shared_tokens


def test_equal_tokenizers_of_other_width_pass() -> None:
    """Padding rows of either model are no difference."""
    tokenizer = tiny_tokenizer(300)
    check_same_tokens(tokenizer, tiny_tokenizer(300), 320, 304)


def test_the_first_differing_id_is_named() -> None:
    """Known bug 55: before anything runs, with both tokens and the remedy."""
    target, draft = tiny_tokenizer(128), tiny_tokenizer(300)
    tokens = [{i: t for t, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft)]
    first = next(i for i in range(128) if tokens[0].get(i) != tokens[1].get(i))
    with pytest.raises(ConfigError) as caught:
        check_same_tokens(target, draft, 128, 300)
    message = str(caught.value)
    assert message.startswith("speculative.model: the drafter's tokenizer is not the target's")
    assert f"token {first} is {tokens[0].get(first)!r} for the target and {tokens[1].get(first)!r}" in message
    assert "use_heterogeneous_vocab = true" in message


def test_a_token_that_one_of_them_lacks_is_a_difference() -> None:
    target, draft = tiny_tokenizer(300), tiny_tokenizer(300)
    draft.add_tokens(["<tool>"])
    target.add_tokens(["<image>"])
    with pytest.raises(ConfigError, match=re.escape("token 300 is '<image>' for the target and '<tool>'")):
        check_same_tokens(target, draft, 304, 304)


def test_without_tokenizers_widths_must_agree() -> None:
    check_same_tokens(None, tiny_tokenizer(128), 128, 128)
    with pytest.raises(ConfigError, match="the target has no tokenizer to compare.*300 .*128"):
        check_same_tokens(None, tiny_tokenizer(128), 300, 128)


def test_ids_beyond_the_drafter_are_replaced() -> None:
    tokenizer = tiny_tokenizer(300)
    vocabulary = same_ids(320, 304, tokenizer)
    space = tokenizer.get_vocab()["Ġ"]
    assert vocabulary.to_draft[:304].tolist() == list(range(304))
    assert set(vocabulary.to_draft[304:].tolist()) == {space}
    assert vocabulary.logits(torch.ones(2, 304)).shape == (2, 304)


def test_shared_tokens_stand_for_the_same_text() -> None:
    """Ids are mapped through the bytes that tokens stand for; ends of text meet whatever they are called."""
    target, draft = tiny_tokenizer(400), tiny_tokenizer(300)
    vocabulary = shared_tokens(target, draft, 400, 300, torch.device("cpu"))
    assert vocabulary.draft_ids is not None
    assert vocabulary.target_ids is not None
    pairs = list(zip(vocabulary.draft_ids.tolist(), vocabulary.target_ids.tolist(), strict=True))
    assert len(pairs) > 256
    assert (draft.eos_token_id, target.eos_token_id) in pairs
    for draft_id, target_id in pairs:
        assert draft.decode([draft_id]) == target.decode([target_id])
        assert vocabulary.to_draft[target_id] == draft_id
    missing = sorted(set(range(400)) - set(vocabulary.target_ids.tolist()))
    assert missing
    assert len(set(vocabulary.to_draft[missing].tolist())) == 1
    logits = torch.arange(300.0)[None]
    chosen = vocabulary.logits(logits).argmax(dim=-1)
    assert vocabulary.to_target_ids(chosen).tolist() == [pairs[-1][1]]
    assert vocabulary.fed(vocabulary.to_target_ids(chosen)).tolist() == [pairs[-1][0]]


def test_a_mark_for_the_space_is_a_space() -> None:
    """A SentencePiece-like vocabulary and a byte-level one share words with a space before them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "▁the": 2, "▁": 3, "a": 4, "<0x0A>": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    draft = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    target = tiny_tokenizer(400)
    vocabulary = shared_tokens(target, draft, 400, 6, torch.device("cpu"))
    known = target.get_vocab()
    assert vocabulary.to_draft[known["Ġthe"]] == 2
    assert vocabulary.to_draft[known["Ġ"]] == 3
    assert vocabulary.to_draft[known["Ċ"]] == 5


def test_nothing_shared_and_no_tokenizer_are_refused() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"the target has no tokenizer"):
        shared_tokens(None, tiny_tokenizer(128), 128, 128, cpu)
    with pytest.raises(ConfigError, match=r"the drafter has no tokenizer"):
        shared_tokens(tiny_tokenizer(128), None, 128, 128, cpu)
    with pytest.raises(ConfigError, match=r"no token in common"):
        shared_tokens(tiny_tokenizer(128), tiny_tokenizer(128), 128, 0, cpu)


def test_the_map_covers_every_target_id() -> None:
    vocabulary = shared_tokens(tiny_tokenizer(300), tiny_tokenizer(128), 320, 128, torch.device("cpu"))
    assert vocabulary.to_draft.shape == (320,)
    assert np.all((vocabulary.to_draft >= 0) & (vocabulary.to_draft < 128))


def test_an_unknown_token_beyond_the_drafters_width_is_not_fed() -> None:
    tokenizer = tiny_tokenizer(128)
    tokenizer.add_special_tokens({"unk_token": "<beyond>"})
    width = tokenizer.unk_token_id
    assert same_ids(width + 9, width, tokenizer).to_draft.max() < width
    assert shared_tokens(tiny_tokenizer(300), tokenizer, 320, width, torch.device("cpu")).to_draft.max() < width
