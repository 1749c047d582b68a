"""Fits drafts to the grammars of their requests before they are scheduled: cut where refused, extended where forced."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from specdec.engine.request import NO_DRAFT, RequestDraft

if TYPE_CHECKING:
    from specdec.engine.request import Request
    from specdec.grammar.state import RequestGrammar

logger = logging.getLogger(__name__)


class DraftShaping:
    """Shapes the drafts of requests with structured output, one at a time.

    A draft without laws ends before the first token that the grammar refuses, which is exact for any draft that was
    chosen without chance or is verified as if it had been. A drawn token cannot be left out because of what it is: the
    tokens that stay would no longer have the law that the verifier is told. With a verifier that uses the laws the
    refused token therefore stays, as the last of its path; the masked target gives it no chance, so it is rejected,
    and the token in its place comes from what its law leaves of the target's.
    """

    def __init__(self, *, keeps_laws: bool = False) -> None:
        """Make it.

        Args:
            keeps_laws: whether the verifier uses laws of draft tokens; the drafts for others lose them.
        """
        self.seconds = 0.0
        """Time spent since the engine started."""
        self.num_cut_tokens = 0
        """Draft tokens left out because a grammar refuses them or a token before them."""
        self._keeps_laws = keeps_laws

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
        drawn = self._keeps_laws and not request.params.greedy
        try:
            return self._extend(grammar, self._cut(grammar, draft, drawn), limit)
        except Exception:
            # The masks of the next step meet the same fault, which then fails the request with its cause.
            logger.exception("the grammar of request %r failed on a draft", request.request_id)
            return NO_DRAFT
        finally:
            self.seconds += time.perf_counter() - begin

    def _cut(self, grammar: RequestGrammar, draft: RequestDraft, drawn: bool) -> RequestDraft:
        """The draft without the tokens that the grammar refuses, unless they were drawn, and what follows them."""
        if not draft.token_ids:
            return NO_DRAFT
        fits = grammar.fitting(draft.token_ids, draft.parents)
        probs = draft.probs if drawn else None
        above = range(-1, len(fits) - 1) if draft.parents is None else draft.parents
        kept = [
            node for node, ok in enumerate(fits) if ok or (probs is not None and (above[node] < 0 or fits[above[node]]))
        ]
        self.num_cut_tokens += len(fits) - len(kept)
        if not kept:
            return NO_DRAFT
        tokens = [draft.token_ids[node] for node in kept]
        laws = None if probs is None else probs[kept]
        if draft.parents is None:
            return RequestDraft(tokens, None, laws)
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return RequestDraft(tokens, [place[draft.parents[node]] for node in kept], laws)

    def _extend(self, grammar: RequestGrammar, draft: RequestDraft, limit: int) -> RequestDraft:
        """A chain with what the grammar forces behind it; a tree as it is."""
        room = limit - len(draft)
        if room <= 0 or draft.parents is not None:
            return draft
        forced = grammar.forced(draft.token_ids, room)
        if not forced:
            return draft
        probs = draft.probs
        if probs is not None:
            certain = probs.new_zeros(len(forced), probs.shape[1])
            certain[range(len(forced)), forced] = 1.0
            probs = torch.cat([probs, certain])
        return RequestDraft([*draft.token_ids, *forced], None, probs, num_forced=len(forced))
