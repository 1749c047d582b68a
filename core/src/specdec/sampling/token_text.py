"""The bytes that each token of a fast tokenizer stands for, read from the tokenizer itself.

Most tokenizers decode in one of two ways, and for both the text of a sequence is the UTF-8 decoding of its tokens'
bytes, joined:

* *byte level* (GPT-2 and most models since): every character of a token names one byte;
* *byte fallback* (SentencePiece models such as Llama 2, Mistral, Gemma): a token is text in which "▁" stands for a
  space, or ``<0xNN>``, one byte.

With the bytes at hand a token costs one dictionary look-up, and nothing about earlier tokens need be decoded again.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define, field

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, other bytes are characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


@define(eq=False)
class TokenBytes:
    """Token id -> bytes, filled as tokens come."""

    _backend: Any
    """The `tokenizers.Tokenizer`."""
    _replacements: tuple[tuple[str, str], ...] | None
    """For byte fallback: what is replaced in a token's text; None for byte level."""
    strips_first_space: bool
    """Whether decoding drops one space at the start of a text."""
    _special_ids: frozenset[int]
    _known: dict[int, bytes] = field(factory=dict)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; nothing for an id the tokenizer does not know."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    @cached_property
    def longest(self) -> int:
        """No token has more bytes than this, so that a text of N bytes has at least N / longest tokens."""
        return max(len(token.encode()) for token in self._backend.get_vocab())

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves the token out."""
        return token_id in self._special_ids

    @property
    def one_mark_per_byte(self) -> bool:
        """Whether bytes that are no UTF-8 become one replacement character each, or one for each maximal subpart."""
        return self._replacements is not None

    def _read(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._replacements is None:
            alphabet = _byte_of_character()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()


_tables: WeakKeyDictionary[Any, TokenBytes | None] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The table of a tokenizer, made once; None when it decodes in another way."""
    try:
        return _tables[tokenizer]
    except KeyError:
        table = _tables[tokenizer] = _make_table(tokenizer)
        return table
    except TypeError:  # not hashable, or without weak references
        return _make_table(tokenizer)


def _make_table(tokenizer: Any) -> TokenBytes | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if backend is None or decoder is None:
        return None
    try:
        steps = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    kind = _kind_of(steps.get("decoders", [steps]))
    if kind is None:
        return None
    special = (i for i, added in backend.get_added_tokens_decoder().items() if added.special)
    table = TokenBytes(backend, kind[0], kind[1], frozenset(special))
    return table if _agrees(table, tokenizer) else None


def _kind_of(steps: list[dict[str, Any]]) -> tuple[tuple[tuple[str, str], ...] | None, bool] | None:
    """(replacements or None, strips first space) of a decoder made of these steps, if it is of a kind known here."""
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return None, False
    replacements = []
    while types and types[0] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        types, steps = types[1:], steps[1:]
    if types[:2] != ["ByteFallback", "Fuse"]:
        return None
    if len(types) == 2:
        return tuple(replacements), False
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return (tuple(replacements), True) if steps[2:] == [strip] else None


def _agrees(table: TokenBytes, tokenizer: Any) -> bool:
    """Compare with the tokenizer on some tokens, each with a space on either side of it where there is one."""
    ids = random.Random(0).sample(range(len(tokenizer)), min(len(tokenizer), 128))
    for token_id in ids:
        text = table.of(token_id).decode(errors="replace")
        if table.strips_first_space:
            text = text.removeprefix(" ")
        if text != tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False):
            return False
    return True
