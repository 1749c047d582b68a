"""A tokenizer for tiny models, trained in this process in milliseconds."""

from __future__ import annotations

from typing import Any

_SPECIAL_TOKENS = ("<s>", "</s>")
_MIN_BYTE_LEVEL = 256 + len(_SPECIAL_TOKENS)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs through the forest to the river",
    "a draft model proposes tokens and the target model verifies them in one forward pass",
    "def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    "1. first item\n2. second item\n3. third item\n",
    " ".join(first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in "dlmnrst"),
    "Die Straße führt über die Brücke; naïve café, emoji 🙂🚀, Привет мир, 你好世界",
)

_CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(vocab_size: int = 512) -> Any:
    """A transformers tokenizer with ``vocab_size`` ids (at most about 900), ``<s>`` (0) and ``</s>`` (1) among them.

    From 258 ids on it is a byte-level BPE, which reads and writes any text; below, it is a character-level one that
    maps what it does not know to a question mark.

    Args:
        vocab_size: ids must lie below this; at least 8.

    Raises:
        ValueError: ``vocab_size`` is below 8.
    """
    if vocab_size < 8:
        raise ValueError(f"vocab_size is {vocab_size}; a tokenizer needs at least 8 ids")
    from transformers import PreTrainedTokenizerFast

    backend = _byte_level(vocab_size) if vocab_size >= _MIN_BYTE_LEVEL else _character_level(vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _byte_level(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _character_level(vocab_size: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = (
        "?"
        + " etaoinshrdlucmfwygpbvkxqjz"
        + "ETAOINSHRDLUCMFWYGPBVKXQJZ0123456789.,:;!\"'()[]{}<>+-*/=_#@&%$|\\^~`\n\t"
    )
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *characters)) if index < vocab_size}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return tokenizer
