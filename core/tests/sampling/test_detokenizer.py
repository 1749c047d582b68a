"""Pieces of text joined equal decoding in one go, for tokenizers of each kind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specdec.sampling import detokenizer as module
from specdec.sampling.detokenizer import IncrementalDetokenizer
from specdec.sampling.params import SamplingParams
from specdec.sampling.token_text import token_bytes

TEXT = (
    "the quick brown fox jumps over the lazy dog. Stop! 123 don't. naïve café — “quotes” 你好，世界。 "
    "🙂 👩‍👩‍👧‍👦 🇩🇪 नमस्ते привет \n\t  indented\n"
)


def wrapped(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<|tool call|>", special=False, normalized=False), AddedToken("日本 語")])


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """GPT-2's kind: tokens are runs of bytes, so characters may be spread over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    add_tokens(tokenizer)
    return wrapped(tokenizer)


def sentencepiece(*, strip: bool) -> Any:
    """Llama 2's kind: words with "▁", and one token per byte for what has no word."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁quick", "fox", "s", ".", "▁▁", "é"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz", "好", "▁🙂"]
    pieces = list(dict.fromkeys(pieces))
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    add_tokens(tokenizer)
    return wrapped(tokenizer)


@pytest.fixture(scope="module")
def llama() -> Any:
    return sentencepiece(strip=True)


@pytest.fixture(scope="module")
def gemma() -> Any:
    return sentencepiece(strip=False)


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """T5's kind, read through the generic path."""
    pieces = ["<unk>", "▁", "▁the", "▁quick", "fox", "s", ".", "é", "▁🙂", "好"]
    tokenizer = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    add_tokens(tokenizer)
    return wrapped(tokenizer)


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    """BERT's kind: spaces between words are not in the tokens."""
    pieces = ["[UNK]", "the", "quick", "fox", "##es", "##s", ".", "é", "good", "##ness"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    add_tokens(tokenizer)
    return wrapped(tokenizer)


class Slow:
    """A tokenizer without a backend: the generic path, with the option only such tokenizers know."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], *, spaces_between_special_tokens: bool, **options: Any) -> str:
        assert spaces_between_special_tokens is False
        return self._tokenizer.decode(token_ids, **options)


PARAMS = SamplingParams(spaces_between_special_tokens=False)


def pieces_of(
    tokenizer: Any, tokens: Sequence[int], cuts: Sequence[int], prompt: Sequence[int] = (), params: Any = PARAMS
) -> list[str]:
    """Feed the tokens in runs that end at ``cuts``."""
    detokenizer = IncrementalDetokenizer(tokenizer, list(prompt), params)
    ends = [*sorted(cuts), len(tokens)]
    runs = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return [*(detokenizer.append(run) for run in runs), detokenizer.finish()]


def ids_of(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)


def test_which_path_each_takes(byte_level: Any, llama: Any, gemma: Any, metaspace: Any, wordpiece: Any) -> None:
    assert all(token_bytes(t) is not None for t in (byte_level, llama, gemma))
    assert all(token_bytes(t) is None for t in (metaspace, wordpiece, Slow(llama)))
    assert token_bytes(byte_level) is token_bytes(byte_level)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), cuts=st.lists(st.integers(0, 30), max_size=8), skip=st.booleans())
def test_byte_level_any_tokens(byte_level: Any, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    tokens = data.draw(ids_of(byte_level))
    prompt = data.draw(ids_of(byte_level))
    params = SamplingParams(skip_special_tokens=skip)
    text = "".join(pieces_of(byte_level, tokens, cuts, prompt, params))
    assert text == byte_level.decode(tokens, skip_special_tokens=skip)


def valid_runs_only(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Whether every run of byte tokens is UTF-8."""
    run = b""
    for token in [*tokens, None]:
        piece = "" if token is None else tokenizer.convert_ids_to_tokens(token)
        if piece in ("<s>", "</s>"):
            continue
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


def spelled(tokenizer: Any, text: str) -> list[int]:
    """Tokens for a text: byte tokens for some characters, others where the vocabulary has them."""
    return tokenizer.encode(text, add_special_tokens=False)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet=[*TEXT, *"abc foxs.é好🙂"], max_size=25),
    specials=st.lists(st.integers(0, 40), max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    kind=st.sampled_from(["llama", "gemma"]),
)
def test_byte_fallback_any_text(
    llama: Any, gemma: Any, text: str, specials: list[int], cuts: list[int], kind: str
) -> None:
    tokenizer = {"llama": llama, "gemma": gemma}[kind]
    tokens = spelled(tokenizer, text)
    if valid_runs_only(tokenizer, tokens):
        for place in specials:
            tokens.insert(min(place, len(tokens)), tokenizer.convert_tokens_to_ids("</s>"))
    if valid_runs_only(tokenizer, tokens):
        assert "".join(pieces_of(tokenizer, tokens, cuts)) == tokenizer.decode(tokens, skip_special_tokens=True)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_byte_fallback_any_tokens(llama: Any, data: st.DataObject, cuts: list[int]) -> None:
    """Also where byte tokens are no UTF-8: as many marks for bytes that stand alone, and the same however cut."""
    tokens = data.draw(ids_of(llama))
    text = "".join(pieces_of(llama, tokens, cuts))
    assert text == "".join(pieces_of(llama, tokens, []))
    if valid_runs_only(llama, tokens):
        assert text == llama.decode(tokens, skip_special_tokens=True)


def test_bytes_that_are_no_character(llama: Any) -> None:
    ids = [llama.convert_tokens_to_ids(t) for t in ("<0xE4>", "<0xBD>", "fox", "<0xFF>", "<0xC3>", "<0xA9>")]
    assert llama.decode(ids[:3]) == "��fox"
    assert "".join(pieces_of(llama, ids[:3], [1, 2])) == "��fox"
    # In one go the whole run "FF C3 A9" is marked; here its valid part, given out at once, stays.
    assert "".join(pieces_of(llama, ids[2:], [1, 2])) == "fox�é"


@settings(deadline=None, max_examples=150)
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    name=st.sampled_from(["byte_level", "llama", "metaspace", "wordpiece", "slow"]),
)
def test_the_generic_path(
    byte_level: Any, llama: Any, metaspace: Any, wordpiece: Any, data: st.DataObject, cuts: list[int], name: str
) -> None:
    tokenizer = {
        "byte_level": byte_level,
        "llama": llama,
        "metaspace": metaspace,
        "wordpiece": wordpiece,
        "slow": Slow(wordpiece),
    }[name]
    tokens = data.draw(ids_of(wordpiece if name == "slow" else tokenizer))
    if name == "byte_level":  # whole characters; broken ones are for the byte path
        tokens = byte_level.encode(byte_level.decode(tokens).replace("�", ""))
    if name == "llama" and not valid_runs_only(llama, tokens):
        return
    stream = module._WindowStream(tokenizer, [], PARAMS)
    ends = [*sorted(cuts), len(tokens)]
    text = "".join(stream.append(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)) + stream.finish()
    options = {"spaces_between_special_tokens": False} if name == "slow" else {}
    assert text == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False, **options)


def test_text_comes_as_soon_as_it_is_certain(byte_level: Any, llama: Any) -> None:
    emoji = "🙂"
    for tokenizer in (byte_level, llama):
        tokens = spelled(tokenizer, "a" + emoji + "b") if tokenizer is byte_level else None
        if tokens is None:
            tokens = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "b")]
        pieces = pieces_of(tokenizer, tokens, range(1, len(tokens)))
        assert "".join(pieces) == "a🙂b"
        assert "�" not in "".join(pieces)
        assert pieces.count("") == len(tokens) - 3 + 1  # the bytes before the emoji's last one, and finish()
        whole = pieces_of(tokenizer, tokens, [3])
        assert whole[0] == "a"


def test_an_unfinished_character_comes_at_the_end(byte_level: Any) -> None:
    tokens = spelled(byte_level, "ok 🙂")
    cut = tokens[:-1]
    assert byte_level.decode(cut).endswith("�")
    pieces = pieces_of(byte_level, cut, [])
    assert pieces == ["ok ", "�"]


def test_the_text_continues_the_prompt(llama: Any, metaspace: Any, byte_level: Any) -> None:
    for tokenizer in (llama, metaspace):
        prompt = [tokenizer.convert_tokens_to_ids(t) for t in ("▁the", "▁quick")]
        output = [tokenizer.convert_tokens_to_ids(t) for t in ("▁the", "fox")]
        assert "".join(pieces_of(tokenizer, output, [1], prompt)) == " thefox"
        assert "".join(pieces_of(tokenizer, output, [1])) == "thefox"
        start = [tokenizer.convert_tokens_to_ids("<s>")]
        assert "".join(pieces_of(tokenizer, output, [1], start)) == "thefox"
    half = spelled(byte_level, "🙂")[:-1]
    assert "".join(pieces_of(byte_level, spelled(byte_level, "a"), [], half)) == "a"
    window = module._WindowStream(byte_level, half, PARAMS)
    assert window.append(spelled(byte_level, "a")) + window.finish() == "a"


def test_special_tokens_and_added_tokens(byte_level: Any) -> None:
    tokens = [byte_level.convert_tokens_to_ids(t) for t in ("<s>", "a", "<|tool call|>", "日本 語", "</s>")]
    assert "".join(pieces_of(byte_level, tokens, [1, 3])) == "a<|tool call|>日本 語"
    shown = SamplingParams(skip_special_tokens=False)
    assert "".join(pieces_of(byte_level, tokens, [2], params=shown)) == "<s>a<|tool call|>日本 語</s>"


def test_ids_the_tokenizer_does_not_know(byte_level: Any) -> None:
    """Logits are often wider than the vocabulary."""
    tokens = [byte_level.convert_tokens_to_ids("a"), 100_000]
    assert "".join(pieces_of(byte_level, tokens, [1])) == "a"


def test_endless_broken_bytes_are_not_held_forever(byte_level: Any) -> None:
    broken = byte_level.convert_tokens_to_ids("ÿ")
    stream = module._WindowStream(byte_level, [], PARAMS)
    longest = 0
    for _ in range(100):
        stream.append([broken])
        longest = max(longest, len(stream._ids) - stream._read)
    assert longest <= module._MOST_TOKENS_HELD + 1


def test_a_decoder_that_does_not_agree_is_not_trusted() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()

    class Shouting:
        backend_tokenizer = tokenizer

        def __len__(self) -> int:
            return 2

        def decode(self, token_ids: list[int], **options: Any) -> str:
            return tokenizer.decode(token_ids).upper()

    assert token_bytes(Shouting()) is None
    detokenizer = IncrementalDetokenizer(Shouting(), [], PARAMS)
    with warnings.catch_warnings():
        assert detokenizer.append([0, 1]) + detokenizer.finish() == "AB"
