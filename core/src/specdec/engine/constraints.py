"""What constrains the output of requests in one engine: the grammar backend and the logits processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting.base import Proposer
    from specdec.grammar.interface import CompiledGrammar
    from specdec.grammar.service import GrammarService
    from specdec.grammar.state import RequestGrammar
    from specdec.sampling.custom import NamedProcessor
    from specdec.sampling.params import SamplingParams
    from specdec.types import TargetInfo


class Constraints:
    """Checks the constraints of requests, and compiles their grammars; from any thread."""

    def __init__(
        self,
        info: TargetInfo,
        grammars: GrammarService,
        processors: Sequence[NamedProcessor] = (),
        proposer: Proposer | None = None,
    ) -> None:
        """Take the parts of one engine.

        Args:
            info: the target's facts.
            grammars: compiles grammars.
            processors: in the order in which they run.
            proposer: may read arguments of its own from ``extra_args``.
        """
        self.processors = tuple(processors)
        self._info = info
        self._grammars = grammars
        self._proposer = proposer

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of a request, compiled now unless it is known; None when its output is free.

        Slow for a new grammar: call it where nobody waits for the engine. Whoever holds the result finds it again.

        Raises:
            InvalidRequestError: a processor refuses its arguments, or the grammar is malformed.
            SpecdecError: there is no usable grammar backend.
        """
        for processor in self.processors:
            processor.check(params)
        self._check_extra_args(params)
        if params.structured_outputs is None:
            return None
        return self._grammars.compile(params.structured_outputs.spec())

    def is_slow(self, params: SamplingParams) -> bool:
        """Whether `compile` has a grammar to compile."""
        wanted = params.structured_outputs
        return wanted is not None and not self._grammars.knows(wanted.spec())

    def _check_extra_args(self, params: SamplingParams) -> None:
        if self._proposer is not None:
            self._proposer.check_request(params)
        known = () if self._proposer is None else self._proposer.request_options
        unknown = sorted(set(params.extra_args) - set(known))
        own = f" The proposer takes {', '.join(known)}." if known else ""
        if unknown and not self.processors:
            raise InvalidRequestError(
                f"extra_args has {', '.join(unknown)}, but this engine has no logits processors; name them in "
                f"logits_processors.{own}"
            )

    def follow(self, compiled: CompiledGrammar | None, params: SamplingParams) -> RequestGrammar | None:
        """The grammar state of one new request."""
        if compiled is None:
            return None
        return self._grammars.follow(
            compiled, params, vocab_size=self._info.vocab_size, end_token_ids=self._info.eos_token_ids
        )
