"""Fits drafts to the grammars of their requests before they are scheduled: cut where refused, extended where forced."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from specdec.engine.request import NO_DRAFT, RequestDraft

if TYPE_CHECKING:
    from specdec.engine.request import Request
    from specdec.grammar.state import RequestGrammar

logger = logging.getLogger(__name__)


class DraftShaping:
    """Shapes the drafts of requests with structured output, one at a time.

    A shaped draft counts as deterministic, also where the proposer drew it from a law: its ``probs`` are dropped for
    every request with a grammar, whether or not its draft was cut. Verifying a token against a one-hot law is exact for
    any token, however it came about; keeping the law for the drafts that happen to fit the grammar would not be, since
    those are no longer drawn from it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time spent since the engine started."""
        self.num_cut_tokens = 0
        """Draft tokens left out because a grammar refuses them."""
        self.num_forced_tokens = 0
        """Draft tokens added because a grammar leaves one continuation."""

    def shape(self, request: Request, draft: RequestDraft, limit: int) -> RequestDraft:
        """The draft to schedule.

        Args:
            request: a request with a grammar that has not ended.
            draft: what the proposer gave for it, possibly nothing.
            limit: the most draft tokens the request can use.
        """
        grammar = request.grammar
        assert grammar is not None
        begin = time.perf_counter()
        try:
            return self._extend(grammar, self._cut(grammar, draft), limit)
        except Exception:
            # The masks of the next step meet the same fault, which then fails the request with its cause.
            logger.exception("the grammar of request %r failed on a draft", request.request_id)
            return NO_DRAFT
        finally:
            self.seconds += time.perf_counter() - begin

    def _cut(self, grammar: RequestGrammar, draft: RequestDraft) -> RequestDraft:
        """The draft without the tokens that the grammar refuses, and without what follows them."""
        if not draft.token_ids:
            return NO_DRAFT
        fits = grammar.fitting(draft.token_ids, draft.parents)
        kept = [node for node, ok in enumerate(fits) if ok]
        self.num_cut_tokens += len(fits) - len(kept)
        tokens = [draft.token_ids[node] for node in kept]
        if draft.parents is None:
            return RequestDraft(tokens) if tokens else NO_DRAFT
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return RequestDraft(tokens, [place[draft.parents[node]] for node in kept]) if tokens else NO_DRAFT

    def _extend(self, grammar: RequestGrammar, draft: RequestDraft, limit: int) -> RequestDraft:
        """A chain with what the grammar forces behind it; a tree as it is."""
        room = limit - len(draft)
        if room <= 0 or draft.parents is not None:
            return draft
        forced = grammar.forced(draft.token_ids, room)
        self.num_forced_tokens += len(forced)
        return RequestDraft([*draft.token_ids, *forced]) if forced else draft
