"""Text of a growing output, piece by piece, equal to decoding it in one go."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from specdec.sampling.token_text import TokenBytes, token_bytes

if TYPE_CHECKING:
    import numpy as np

    from specdec.sampling.params import SamplingParams

_REPLACEMENT = "\ufffd"
_MARK_EACH_BYTE = "specdec-mark-each-byte"
_CONTEXT_TOKENS = 6
_MOST_BYTES_MISSING = 3
"""A character is at most four bytes of UTF-8, so at most this many tokens end within it."""
_MOST_TOKENS_HELD = 8


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_MARK_EACH_BYTE, _mark_each_byte)


class _Stream(Protocol):
    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """Turns output tokens into text as they come, one or several at a time.

    Only text that later tokens cannot change is given out: an emoji whose bytes are spread over tokens comes with the
    last of them. The pieces joined are what decoding all output tokens at once gives, however they were grouped, with
    two refinements:

    * The text continues the prompt's: a tokenizer that drops the space at the start of a text does not drop it between
      prompt and output.
    * Where byte tokens are no valid UTF-8, each such byte is one replacement character and the valid ones beside it
      stay. (Decoding at once, byte-fallback tokenizers replace the whole run of byte tokens, which text already given
      out cannot follow.)

    Clean-up of spaces before punctuation, which changes what the model said, is left out.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams) -> None:
        table = token_bytes(tokenizer)
        prompt = [int(t) for t in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._stream: _Stream = (
            _WindowStream(tokenizer, prompt, params)
            if table is None
            else _ByteStream(table, prompt, skip_special=params.skip_special_tokens)
        )

    def append(self, token_ids: Sequence[int]) -> str:
        """Take in new output tokens; return the text that has become certain, possibly empty."""
        return self._stream.append(token_ids)

    def finish(self) -> str:
        """The rest of the text; the output has ended."""
        return self._stream.finish()


class _ByteStream:
    """For tokenizers whose tokens are bytes: one UTF-8 decoder over their bytes."""

    def __init__(self, table: TokenBytes, prompt: Sequence[int], *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(_MARK_EACH_BYTE if table.one_mark_per_byte else "replace")
        continues = any(not (skip_special and table.is_special(t)) for t in prompt)
        self._strip_space = table.strips_first_space and not continues

    def append(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if self._skip_special:
            token_ids = [t for t in token_ids if not table.is_special(t)]
        text = self._decoder.decode(b"".join([table.of(t) for t in token_ids]))
        if text and self._strip_space:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For any tokenizer: decode the last tokens again together with the new ones, and take what is new.

    ::

        ids      [ already given out ............ | given out last | new ]
                                                  start            read
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {
            "skip_special_tokens": params.skip_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        if not getattr(tokenizer, "is_fast", False):
            self._options["spaces_between_special_tokens"] = params.spaces_between_special_tokens
        context = self._decode(prompt)
        # A prompt that ends within a character gives no context: the output is decoded by itself.
        self._ids = [] if context.endswith(_REPLACEMENT) else list(prompt)
        self._context = context if self._ids else ""
        self._start = 0
        self._read = len(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, **self._options) if token_ids else ""

    def append(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        end = len(self._ids)
        text = self._decode(self._ids[self._start : end])
        # The end may be within a character: look for the last token that completes one.
        while text.endswith(_REPLACEMENT) and end > self._read and len(self._ids) - end < _MOST_BYTES_MISSING:
            end -= 1
            text = self._decode(self._ids[self._start : end])
        if text.endswith(_REPLACEMENT):
            if len(self._ids) - self._read <= _MOST_TOKENS_HELD:
                return ""
            end = len(self._ids)
            text = self._decode(self._ids[self._start : end])
        return self._advance(text, end)

    def _advance(self, text: str, end: int) -> str:
        new = text[len(self._context) :]
        last = self._decode(self._ids[self._read : end])
        if last:
            self._start, self._context = self._read, last
        else:
            # Special tokens alone are no context for what follows.
            self._context = text
        self._read = end
        return new

    def finish(self) -> str:
        return self._advance(self._decode(self._ids[self._start :]), len(self._ids))
