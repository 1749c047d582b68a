"""`SamplingParams`: what a user asks of one request. Names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import attrs
from attrs import field, frozen

from specdec.errors import InvalidRequestError
from specdec.sampling.structured import StructuredOutputsParams
from specdec.wording import shown

GREEDY_EPSILON = 1e-5
"""A temperature below this is 0: the law is one-hot in float32 anyway."""

MOST_CHOICES = 1 << 14
"""The largest ``n``: each choice is a request of its own in the engine."""

_FLOAT32_SMALLEST = 2.0**-126
_FLOAT32_LARGEST = 2.0**127

TokenSequences = tuple[tuple[int, ...], ...]


def _fail(name: str, value: object, right: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {shown(value)}; it must be {right}.", option=name.partition("[")[0])


def _integer(name: str, value: Any, low: int, right: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _fail(name, value, right)


def _number(name: str, value: Any, ok: bool, right: str) -> None:
    if not ok:
        raise _fail(name, value, right)


def _is_finite(value: Any) -> bool:
    """Whether the value is a number that stays finite in float32, in which logits are processed."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    size: Any = abs(value)
    return bool(size <= _FLOAT32_LARGEST)


def is_unicode(text: str) -> bool:
    """Whether no part of the text is half a character (a lone surrogate), which tokenizers cannot take."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """None, one string or several -> tuple of strings."""
    values = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(values, Iterable):
        raise _fail(name, value, "a string or a list of strings")
    values = tuple(values)
    if not all(isinstance(v, str) and v for v in values):
        raise _fail(name, value, "a string or a list of strings, none of them empty")
    if not all(map(is_unicode, values)):
        raise _fail(name, value, "valid Unicode, without lone surrogates")
    return values


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Several token ids -> tuple in the order given."""
    values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if set(map(type, values)) == {int} and min(values) >= 0:  # almost always; fast, as a client may send millions
        return values
    if any(isinstance(v, bool) or not hasattr(v, "__index__") or v.__index__() < 0 for v in values):
        raise _fail(name, value, "a list of token ids, integers of at least 0")
    return tuple(v.__index__() for v in values)


def _bad_words(value: Any) -> tuple[str, ...]:
    return _strings("bad_words", value)


def _stop(value: Any) -> tuple[str, ...]:
    return _strings("stop", value)


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(dict.fromkeys(_token_ids("allowed_token_ids", value)))


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(dict.fromkeys(_token_ids("stop_token_ids", value)))


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _fail("logit_bias", value, "a mapping of token id to bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        # JSON objects have string keys, so "42" is accepted as a token id.
        token_id = int(key) if isinstance(key, str) and key.strip().isdecimal() else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _fail("logit_bias", key, "keyed by token ids, integers of at least 0")
        if not _is_finite(amount):
            raise _fail(f"logit_bias[{token_id}]", amount, "a finite number")
        bias[token_id] = float(amount)
    return bias


def _banned_sequences(value: Any) -> TokenSequences:
    values = () if value is None else value
    sequences = tuple(_token_ids("bad_words_token_ids", v) for v in values) if isinstance(values, Iterable) else ((),)
    if not all(sequences):
        raise _fail("bad_words_token_ids", value, "a list of token-id sequences, none of them empty")
    return sequences


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    return StructuredOutputsParams.of(value)


def _extra_args(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _fail("extra_args", value, "a mapping with string keys")
    return dict(value)


def _plain_int(value: Any) -> Any:
    """Converter: NumPy's and other integers -> int; everything else is left for the checks."""
    return value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else value


def _seed(value: Any) -> Any:
    return None if value == -1 else _plain_int(value)


@frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Every value is checked on construction; what depends on the model (vocabulary, tokenizer, length) is checked by
    `check_against` when the request is added to an engine.

    Raises:
        InvalidRequestError: a value is out of range, or two options contradict one another.
    """

    n: int = field(default=1, converter=_plain_int)
    """How many outputs to make for the prompt; each has a seed of its own."""
    temperature: float = 1.0
    """Divides the logits; 0 (and anything below 1e-5) takes the most likely token."""
    top_k: int = field(default=0, converter=_plain_int)
    """Keep the k most likely tokens; 0 or -1 keeps all. Among equal logits the lower token id comes first."""
    top_p: float = 1.0
    """Keep the most likely tokens until their probabilities sum to at least this; the most likely one always stays."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one's probability."""
    seed: int | None = field(default=None, converter=_seed)
    """Same seed, same tokens. None (or -1): the engine draws one per request."""
    repetition_penalty: float = 1.0
    """Above 1 discourages tokens of the prompt and the output: positive logits are divided, negative multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens of the output, times their count there."""
    logit_bias: Mapping[int, float] = field(default=None, converter=_logit_bias)
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_allowed_token_ids)
    """When given, no other token can be chosen."""
    bad_words: tuple[str, ...] = field(default=None, converter=_bad_words)
    """Words that must not appear in the output: the last token that would complete one is never chosen."""
    bad_words_token_ids: TokenSequences = field(default=None, converter=_banned_sequences)
    """The same as token sequences, beside those of `bad_words`."""
    min_tokens: int = field(default=0, converter=_plain_int)
    """No end or stop token, and no stop string, counts before this many output tokens."""
    max_tokens: int | None = field(default=16, converter=_plain_int)
    """At most this many output tokens; None: as many as the model length allows."""
    stop: tuple[str, ...] = field(default=None, converter=_stop)
    """Strings that end the output."""
    stop_token_ids: tuple[int, ...] = field(default=None, converter=_stop_token_ids)
    """Token ids that end the output, beside the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the output text."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    logprobs: int | None = field(default=None, converter=_plain_int)
    """Return this many most likely tokens per output token, and the chosen one; -1: the whole vocabulary."""
    prompt_logprobs: int | None = field(default=None, converter=_plain_int)
    """The same for prompt tokens."""
    detokenize: bool = True
    """Whether to produce text; without it only token ids are returned."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens; only tokenizers written in Python know this option."""
    structured_outputs: StructuredOutputsParams | None = field(default=None, converter=_structured_outputs)
    """What the output must look like: a JSON schema, a regular expression, a choice, a grammar."""
    extra_args: Mapping[str, Any] = field(default=None, converter=_extra_args)
    """Arguments for logits processors, by the names that they document; each processor of the engine looks for its
    own."""

    def __attrs_post_init__(self) -> None:
        self._check_counts()
        self._check_laws()
        self._check_flags()
        self._check_contradictions()

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, "an integer of at least 1")
        _number("n", self.n, self.n <= MOST_CHOICES, f"at most {MOST_CHOICES}")
        _integer("top_k", self.top_k, -1, "an integer of at least 1, or 0 or -1 to keep all tokens")
        _integer("min_tokens", self.min_tokens, 0, "an integer of at least 0")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "an integer of at least 1, or none for no limit of its own")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, -1, "an integer of at least 0, -1 for the whole vocabulary, or none")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), "an integer of 64 bits, or none")
            _number("seed", self.seed, self.seed < 2**64, "an integer of 64 bits, or none")

    def _check_laws(self) -> None:
        value: Any = self.temperature
        _number("temperature", value, _is_finite(value) and value >= 0, "a finite number of at least 0")
        value = self.top_p
        _number("top_p", value, _is_finite(value) and 0 < value <= 1, "above 0 and at most 1")
        value = self.min_p
        _number("min_p", value, _is_finite(value) and 0 <= value <= 1, "at least 0 and at most 1")
        value = self.repetition_penalty
        _number(
            "repetition_penalty", value, _is_finite(value) and value >= _FLOAT32_SMALLEST, "a finite number above 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _number(name, value, _is_finite(value) and -2 <= value <= 2, "at least -2 and at most 2")

    def _check_flags(self) -> None:
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            value = getattr(self, name)
            _number(name, value, isinstance(value, bool), "True or False")

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); "
                "raise max_tokens or lower min_tokens.",
                option="min_tokens",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so no token could be chosen; give an id, or leave it out to allow all.",
                option="allowed_token_ids",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop {shown(self.stop)} needs text, but detokenize is off; switch it on or use stop_token_ids."
            )
        if self.greedy and self.n > 1:
            raise InvalidRequestError(
                f"n is {self.n} at temperature {self.temperature}: all outputs would be equal; "
                "set n=1 or a temperature above 0.",
                option="n",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_EPSILON

    def check_against(self, *, vocab_size: int, max_model_len: int, tokenizer: Any = None) -> SamplingParams:
        """Check what depends on the model, and return the parameters an engine works with.

        Args:
            vocab_size: width of the logits.
            max_model_len: most tokens a request can have, prompt included.
            tokenizer: the model's tokenizer, or None when there is none.

        Returns:
            The same parameters, with the token sequences of `bad_words` added to `bad_words_token_ids`.

        Raises:
            InvalidRequestError: a token id is outside the vocabulary, more is asked for than the model can give, or an
                option needs a tokenizer and there is none.
        """
        self._check_ids(vocab_size)
        if self.min_tokens >= max_model_len:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but prompt and output together have at most "
                f"{max_model_len} tokens (max_model_len).",
                option="min_tokens",
            )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and value > vocab_size:
                raise _fail(name, value, f"at most the vocabulary's size, {vocab_size}")
        if tokenizer is None and (self.stop or self.bad_words):
            name = "stop" if self.stop else "bad_words"
            message = f"{name} needs a tokenizer, and this model was loaded without one."
            raise InvalidRequestError(message, option=name)
        if not self.bad_words:
            return self
        sequences = tuple(s for word in self.bad_words for s in _tokenize_bad_word(word, tokenizer))
        # Without repetitions, so that checking twice changes nothing.
        return attrs.evolve(self, bad_words_token_ids=tuple(dict.fromkeys(self.bad_words_token_ids + sequences)))

    def _check_ids(self, vocab_size: int) -> None:
        given = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "bad_words_token_ids": [t for sequence in self.bad_words_token_ids for t in sequence],
        }
        for name, token_ids in given.items():
            outside = sorted({t for t in token_ids if t >= vocab_size})
            if outside:
                shown = ", ".join(map(str, outside[:5])) + (", …" if len(outside) > 5 else "")
                raise InvalidRequestError(
                    f"{name} has token ids outside the vocabulary: {shown}; ids go from 0 to {vocab_size - 1}.",
                    option=name,
                )


def _tokenize_bad_word(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """A word at the start of a text and after a space are different tokens: both are banned.

    The spaced form counts only if it has as many tokens and another first one, as in vLLM; otherwise it would ban
    the space itself.
    """
    bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    if not bare:
        raise InvalidRequestError(f"bad_words has {word!r}, which the tokenizer turns into no token.")
    return [bare, spaced] if spaced and spaced[0] != bare[0] and len(spaced) == len(bare) else [bare]
