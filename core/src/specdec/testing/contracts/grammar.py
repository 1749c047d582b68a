"""The contract of `specdec.grammar.GrammarBackend`."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from attrs import frozen

from specdec.errors import InvalidRequestError
from specdec.grammar.state import bitmask_width
from specdec.sampling.structured import KINDS, GrammarSpec
from specdec.testing.contracts.base import PluginContract
from specdec.testing.tokenizers import tiny_tokenizer

if TYPE_CHECKING:
    from specdec.grammar.interface import GrammarBackend, GrammarMatcher
    from specdec.sampling.structured import GrammarKind


@frozen(kw_only=True)
class GrammarExample:
    """A grammar with texts that it describes and texts that it does not."""

    kind: GrammarKind
    text: str
    fits: tuple[str, ...]
    """Whole texts of the grammar."""
    wrong: tuple[str, ...]
    """Texts that are not, beginnings of whole ones among them."""

    @property
    def spec(self) -> GrammarSpec:
        """What the backend compiles."""
        return GrammarSpec(kind=self.kind, text=self.text)


_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}

EXAMPLES: dict[str, GrammarExample] = {
    "choice": GrammarExample(
        kind="choice",
        text=json.dumps(["yes", "no", "yesterday"]),
        fits=("yes", "no", "yesterday"),
        wrong=("", "ye", "maybe", "yes no", "nope"),
    ),
    "regex": GrammarExample(
        kind="regex", text="[ab]{2}c?", fits=("ab", "bac", "aa"), wrong=("", "a", "abd", "abcc", "cab")
    ),
    "grammar": GrammarExample(
        kind="grammar", text='root ::= "a" | "b" root', fits=("a", "ba", "bba"), wrong=("", "b", "ab", "c")
    ),
    "json": GrammarExample(
        kind="json",
        text=json.dumps(_SCHEMA),
        fits=('{"n": 12}', '{"n":-3}'),
        wrong=("", '{"n": ', '{"m": 1}', '{"n": "x"}', "{}", "[1]"),
    ),
    "json_object": GrammarExample(
        kind="json_object", text="", fits=('{"a": 1}', "{}", '{"b": [true, null]}'), wrong=("", "[1]", '{"a"', "1")
    ),
}
"""One for each kind that can be told by examples."""

MALFORMED: dict[str, GrammarSpec] = {
    "regex": GrammarSpec(kind="regex", text="(a"),
    "grammar": GrammarSpec(kind="grammar", text="root ::= ("),
}


class GrammarBackendContract(PluginContract):
    """What every grammar backend must hold to. A subclass gives the fixture `backend`, made for `tokenizer`.

    Kinds that the backend does not declare are skipped.
    """

    vocab_size: ClassVar[int] = 300
    """Width of the logits."""
    end_token_ids: ClassVar[tuple[int, ...]] = (1,)
    special_token_ids: ClassVar[tuple[int, ...]] = (0,)
    """Tokens without a text that no grammar allows."""

    @pytest.fixture
    def backend(self) -> GrammarBackend:
        """The backend to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'backend'")

    @classmethod
    def tokenizer(cls) -> Any:
        """The tokenizer of the target: a byte-level BPE with ``<s>`` 0 and ``</s>`` 1."""
        return _tokenizer(cls.vocab_size)

    # --- running ----------------------------------------------------------------------------------

    def matcher(self, backend: GrammarBackend, kind: str) -> GrammarMatcher:
        """A matcher of the example; skips the test when the backend does not know its kind."""
        if kind not in backend.kinds:
            pytest.skip(f"the backend does not declare {kind}")
        return backend.compile(EXAMPLES[kind].spec).matcher()

    def encode(self, text: str) -> list[int]:
        """A text as tokens."""
        ids: list[int] = self.tokenizer().encode(text, add_special_tokens=False)
        return ids

    def mask(self, matcher: GrammarMatcher) -> set[int]:
        """The tokens that may come next, by `GrammarMatcher.fill_bitmask`; other rows must stay as they are."""
        bitmask = np.full((3, bitmask_width(self.vocab_size)), 0x5A5A5A5A, dtype=np.int32)
        matcher.fill_bitmask(bitmask, 1)
        assert bool((bitmask[[0, 2]] == 0x5A5A5A5A).all()), "fill_bitmask wrote another row"
        bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")[: self.vocab_size]
        return set(np.flatnonzero(bits).tolist())

    def accepted(self, matcher: GrammarMatcher) -> set[int]:
        """The tokens that may come next, by trying each."""
        found = set()
        for token in range(self.vocab_size):
            if matcher.accept(token):
                found.add(token)
                matcher.rollback(1)
        return found

    # --- checks -----------------------------------------------------------------------------------

    def test_declares_what_it_is(self, backend: GrammarBackend) -> None:
        """A name, and kinds of grammars that exist."""
        assert backend.name
        assert backend.kinds, "kinds is empty"
        assert set(backend.kinds) <= set(KINDS), f"kinds that do not exist: {sorted(set(backend.kinds) - set(KINDS))}"

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_whole_texts(self, backend: GrammarBackend, kind: str) -> None:
        """A text of the grammar is taken token by token, and then an end token, which ends the output."""
        for text in EXAMPLES[kind].fits:
            matcher = self.matcher(backend, kind)
            for place, token in enumerate(self.encode(text)):
                assert not matcher.is_terminated(), f"ended within {text!r}"
                assert matcher.accept(token), f"{text!r}: token {place} is refused"
            assert matcher.accept(self.end_token_ids[0]), f"{text!r} may not end"
            assert matcher.is_terminated(), f"{text!r} has not ended behind the end token"

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_other_texts(self, backend: GrammarBackend, kind: str) -> None:
        """Of another text some token, or the end, is refused."""
        for text in EXAMPLES[kind].wrong:
            matcher = self.matcher(backend, kind)
            taken = all(matcher.accept(token) for token in self.encode(text))
            assert not (taken and matcher.accept(self.end_token_ids[0])), f"{text!r} is taken as a whole text"

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_mask_is_what_accept_takes(self, backend: GrammarBackend, kind: str) -> None:
        """At every place the mask allows exactly the tokens that `accept` takes, special tokens not among them."""
        for text in EXAMPLES[kind].fits:
            matcher = self.matcher(backend, kind)
            for token in [*self.encode(text), self.end_token_ids[0]]:
                allowed = self.mask(matcher)
                assert allowed == self.accepted(matcher), f"within {text!r}"
                assert allowed.isdisjoint(self.special_token_ids)
                assert token in allowed
                assert matcher.accept(token)

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_refusal_changes_nothing(self, backend: GrammarBackend, kind: str) -> None:
        """A refused token leaves the matcher where it was."""
        matcher = self.matcher(backend, kind)
        for token in self.encode(EXAMPLES[kind].fits[0]):
            before = self.mask(matcher)
            others = [other for other in range(self.vocab_size) if other not in before]
            for refused in (others[0], others[len(others) // 2], others[-1]):
                assert not matcher.accept(refused)
                assert self.mask(matcher) == before
            matcher.accept(token)

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_rollback(self, backend: GrammarBackend, kind: str) -> None:
        """Any number of tokens can be taken back, an end token included."""
        matcher = self.matcher(backend, kind)
        run = [*self.encode(EXAMPLES[kind].fits[0]), self.end_token_ids[0]]
        masks = []
        for token in run:
            masks.append(self.mask(matcher))
            assert matcher.accept(token)
        for count in range(1, len(run) + 1):
            matcher.rollback(count)
            assert not matcher.is_terminated(), f"still ended after {count} tokens were taken back"
            assert self.mask(matcher) == masks[len(run) - count], f"{count} tokens taken back"
            assert all(matcher.accept(token) for token in run[len(run) - count :])

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_nothing_follows_the_end(self, backend: GrammarBackend, kind: str) -> None:
        """Behind the end every token is refused."""
        matcher = self.matcher(backend, kind)
        for token in [*self.encode(EXAMPLES[kind].fits[0]), self.end_token_ids[0]]:
            assert matcher.accept(token)
        assert not any(matcher.accept(token) for token in range(self.vocab_size))
        assert matcher.is_terminated()

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_requests_are_apart(self, backend: GrammarBackend, kind: str) -> None:
        """Matchers of one compiled grammar do not know of each other."""
        if kind not in backend.kinds:
            pytest.skip(f"the backend does not declare {kind}")
        compiled = backend.compile(EXAMPLES[kind].spec)
        first, second = compiled.matcher(), compiled.matcher()
        before = self.mask(second)
        for token in self.encode(EXAMPLES[kind].fits[0]):
            assert first.accept(token)
        assert self.mask(second) == before
        assert self.mask(compiled.matcher()) == before

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_suggestions(self, backend: GrammarBackend, kind: str) -> None:
        """What is suggested is taken, is not longer than asked for, and asking changes nothing."""
        for text in EXAMPLES[kind].fits:
            matcher = self.matcher(backend, kind)
            for token in self.encode(text):
                before = self.mask(matcher)
                for limit in (0, 1, 5):
                    suggested = matcher.suggest(limit)
                    assert len(suggested) <= limit
                    assert self.mask(matcher) == before, "suggest() moved the matcher"
                    assert all(matcher.accept(one) for one in suggested), f"suggestion {suggested} is refused"
                    if suggested:
                        matcher.rollback(len(suggested))
                assert matcher.accept(token)

    @pytest.mark.parametrize("kind", MALFORMED)
    def test_malformed(self, backend: GrammarBackend, kind: str) -> None:
        """A malformed grammar is a ValueError with words for the user."""
        if kind not in backend.kinds:
            pytest.skip(f"the backend does not declare {kind}")
        with pytest.raises((ValueError, InvalidRequestError)) as raised:
            backend.compile(MALFORMED[kind])
        assert str(raised.value)

    @pytest.mark.parametrize("kind", EXAMPLES)
    def test_size(self, backend: GrammarBackend, kind: str) -> None:
        """How much memory a compiled grammar holds is a number of bytes."""
        if kind not in backend.kinds:
            pytest.skip(f"the backend does not declare {kind}")
        size = backend.compile(EXAMPLES[kind].spec).num_bytes()
        assert isinstance(size, int)
        assert size >= 0


@functools.cache
def _tokenizer(vocab_size: int) -> Any:
    return tiny_tokenizer(vocab_size)
