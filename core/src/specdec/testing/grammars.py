"""Small grammars, to test an engine and to see what a grammar backend consists of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specdec.grammar.interface import CompiledGrammar, GrammarBackend, GrammarMatcher
from specdec.grammar.state import bitmask_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specdec.sampling.structured import GrammarSpec


class RuleMatcher(GrammarMatcher):
    """Follows any rule that says from the tokens so far which may come next."""

    def __init__(
        self, allowed: Callable[[tuple[int, ...]], Iterable[int]], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        """Begin an output.

        Args:
            allowed: token ids that may follow the ones given, end tokens included where the output may end.
            vocab_size: width of the logits.
            end_token_ids: tokens that end an output.
        """
        self._allowed = allowed
        self._vocab_size = vocab_size
        self._ends = frozenset(end_token_ids)
        self._tokens: list[int] = []

    def accept(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept`."""
        if self.is_terminated() or token_id not in self._allowed(tuple(self._tokens)):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        del self._tokens[len(self._tokens) - num_tokens :]

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """See `GrammarMatcher.fill_bitmask`."""
        assert not self.is_terminated()
        bitmask[row] = bitmask_of(tuple(self._allowed(tuple(self._tokens))), self._vocab_size)

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        if self._ends:
            return bool(self._tokens) and self._tokens[-1] in self._ends
        return not any(True for _ in self._allowed(tuple(self._tokens)))


class RuleGrammar(CompiledGrammar):
    """A rule for `RuleMatcher`."""

    def __init__(
        self, allowed: Callable[[tuple[int, ...]], Iterable[int]], vocab_size: int, end_token_ids: Sequence[int] = ()
    ) -> None:
        """Keep the rule; see `RuleMatcher`."""
        self._arguments = (allowed, vocab_size, end_token_ids)

    def matcher(self) -> RuleMatcher:
        """See `CompiledGrammar.matcher`."""
        return RuleMatcher(*self._arguments)


class ChoiceBackend(GrammarBackend):
    """Knows ``choice`` alone: looks at the text of every token, so for small vocabularies."""

    name: ClassVar[str] = "testing-choice"
    kinds: ClassVar[frozenset[str]] = frozenset({"choice"})

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Read the vocabulary.

        Args:
            tokenizer: a transformers tokenizer.
            vocab_size: width of the logits.
            end_token_ids: tokens that end an output.
        """
        special = set(tokenizer.all_special_ids)
        self._texts = {
            token: tokenizer.decode([token]) for token in range(min(vocab_size, len(tokenizer))) if token not in special
        }
        self._vocab_size = vocab_size
        self._ends = tuple(end_token_ids)

    def compile(self, spec: GrammarSpec) -> RuleGrammar:
        """See `GrammarBackend.compile`."""
        choices: list[str] = json.loads(spec.text)

        def allowed(tokens: tuple[int, ...]) -> Iterable[int]:
            said = "".join(self._texts.get(token, "") for token in tokens)
            ends = self._ends if said in choices else ()
            return [
                *ends,
                *(t for t, text in self._texts.items() if text and any(c.startswith(said + text) for c in choices)),
            ]

        return RuleGrammar(allowed, self._vocab_size, self._ends)
