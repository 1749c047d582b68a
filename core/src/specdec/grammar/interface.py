"""What the core asks of a grammar backend: compile a grammar once, then follow each output token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np

    from specdec.sampling.structured import GrammarSpec


class GrammarMatcher(ABC):
    """Follows one output through a grammar. Used on the engine's thread alone.

    The output ends with an *end token* of the model (`TargetInfo.eos_token_ids`), which is allowed where the text so
    far is complete; an end token stands for no text. For a model without end tokens the output ends where the text is
    complete and nothing could follow.
    """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token.

        Args:
            token_id: any id of the vocabulary, special tokens included.

        Returns:
            False, with the state unchanged, when the grammar does not allow the token here, or when the output has
            ended.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens, an end token included.

        The engine takes back at most the tokens of one draft, which it has accepted since the last commit: at most
        `specdec.config.schema.MAX_SPECULATIVE_TOKENS`.
        """

    @abstractmethod
    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """Write which tokens may come next. Not called when the output has ended.

        Args:
            bitmask: int32 [rows, ceil(V / 32)], on the CPU; token t is bit ``t % 32`` of word ``t // 32``.
            row: the row to write, all words of it; bits of ids beyond the vocabulary are ignored.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the output has ended: an end token was accepted, or, without end tokens, nothing can follow."""

    def suggest(self, limit: int) -> list[int]:
        """Tokens that probably come next, because the grammar leaves one text to continue with.

        They are proposed like draft tokens and verified, so another spelling of the text in tokens is never wrong, only
        rejected. The state is left unchanged.

        Args:
            limit: the most tokens of use.

        Returns:
            Token ids that `accept` would take one after another; empty when the text could go on in several ways.
        """
        return []


class CompiledGrammar(ABC):
    """A grammar for one vocabulary; shared by all requests that ask for it, from any thread."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """A new matcher at the beginning of an output."""

    def num_bytes(self) -> int:
        """About how much memory it holds; bounds the cache of compiled grammars."""
        return 0


class GrammarBackend(ABC):
    """Compiles grammars for the target's vocabulary."""

    name: ClassVar[str] = ""
    """What messages call it: the entry point's name."""
    kinds: ClassVar[frozenset[str]] = frozenset({"json", "json_object", "regex", "choice", "grammar"})
    """The values of `GrammarSpec.kind` that it compiles; requests for others are refused before `compile`."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile one grammar.

        Called before a request is queued, on the caller's thread, for one grammar at a time or for several at once;
        results are kept and shared by the engine.

        Raises:
            ValueError: the grammar is malformed or asks for what the backend does not know; the text is shown to the
                user behind the name of the option.
        """
