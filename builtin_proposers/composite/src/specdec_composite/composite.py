"""The method `composite`: for each request and step one of several proposers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.engine.request import NO_DRAFT, RequestDraft
from specdec.types import Draft, Needs, ProposerCapabilities
from specdec_composite.member import judged_length
from specdec_composite.worth import Pace

if TYPE_CHECKING:
    from specdec.types import DraftOutcome, ProposalInput, RequestInfo
    from specdec_composite.member import Member


class CompositeProposer(Proposer):
    """Asks its members in order; what one of them gets wrong costs that member alone."""

    def __init__(self, members: Sequence[Member], *, choose: Literal["first", "best"], vocab_size: int) -> None:
        """Take the members.

        Args:
            members: in order of preference; at least one.
            choose: "first": the first draft that is not empty; "best": the draft with the most tokens expected to be
                accepted, of members whose drafts are worth their time (`specdec_composite.worth`).
            vocab_size: the target's.
        """
        self._members = list(members)
        self._best = choose == "best"
        self._vocab_size = vocab_size
        self._pace = Pace()
        self._accepted = 0
        """Tokens of drafts kept in the last step."""
        self._propose_seconds = 0.0
        """Of the proposal before that step."""
        self._wanted: dict[str, str] = {}
        self._served: dict[str, Member] = {}
        self.methods = tuple([member.name for member in members])
        needs = [member.proposer.needs for member in members]
        self.needs = Needs(
            hidden_states=any(need.hidden_states for need in needs),
            every_step=any(need.every_step for need in needs),
            lookahead_slots=max(need.lookahead_slots for need in needs),
            next_token=any(need.next_token for need in needs),
            aux_layers=tuple(sorted({layer for need in needs for layer in need.aux_layers})),
        )
        given = [member.proposer.capabilities for member in members]
        most = [one.max_draft_tokens for one in given]
        self.capabilities = ProposerCapabilities(
            trees=any(one.trees for one in given),
            draft_probs=any(one.draft_probs for one in given),
            max_draft_tokens=None if None in most else max(number for number in most if number is not None),
            keeps_finished_requests=any(one.keeps_finished_requests for one in given),
        )

    def load(self, target: Any) -> None:
        """See `Proposer.load`. A member that cannot load stops the start: nothing runs yet."""
        for member in self._members:
            member.proposer.load(target)

    def kv_bytes_per_token(self) -> int:
        """See `Proposer.kv_bytes_per_token`."""
        return sum(member.proposer.kv_bytes_per_token() for member in self._members)

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`."""
        wanted = None if request.speculation is None else request.speculation.method
        if wanted in self.methods:
            self._wanted[request.request_id] = str(wanted)
        for member in self._members:
            member.guarded(lambda member=member: member.proposer.start(request))  # type: ignore[misc]

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        begin = time.perf_counter()
        if batch.step_seconds is not None:
            self._pace.observe(len(batch.request_ids) + self._accepted, batch.step_seconds + self._propose_seconds)
        self._accepted = 0
        draft = self._packed(self._drafts(batch))
        self._propose_seconds = time.perf_counter() - begin
        return draft

    def _drafts(self, batch: ProposalInput) -> list[RequestDraft]:
        """The draft chosen for each request."""
        drafts = [NO_DRAFT] * len(batch.request_ids)
        promised = np.zeros(len(drafts))
        for request_id in batch.request_ids:
            self._served.pop(request_id, None)
        only = self._only(batch)
        for member, enough in self._order():
            chosen = [
                i
                for i in range(len(drafts))
                if member.is_on
                and batch.max_draft_tokens[i] > 0
                and (only[i] is member if only[i] is not None else promised[i] < enough)
            ]
            if not chosen and not member.proposer.needs.every_step:
                continue
            found = member.draft(batch, chosen, self._vocab_size, self.needs.aux_layers)
            if found is None:
                continue
            promise = member.worth.expected_tokens()
            for i, draft in zip(chosen, found, strict=True):
                limit = min(int(batch.max_draft_tokens[i]), member.max_draft_tokens)
                if len(draft) and promise[judged_length(draft, limit)] > promised[i]:
                    drafts[i], promised[i] = draft, promise[judged_length(draft, limit)]
                    self._served[batch.request_ids[i]] = member
        return drafts

    def _order(self) -> list[tuple[Member, float]]:
        """The members in the order of asking, and the promise in hand that makes asking one needless."""
        if not self._best:
            return [(member, np.finfo(float).tiny) for member in self._members]
        rate = self._pace.tokens_per_second
        found = [(member, member.worth.reservation(rate)) for member in self._members]
        return sorted(found, key=lambda one: -one[1])

    def _only(self, batch: ProposalInput) -> list[Member | None]:
        """The one member that may draft for a request: which it wanted, or which is to be tried; None: any."""
        by_name = {member.name: member for member in self._members}
        found = [by_name.get(self._wanted.get(request_id, "")) for request_id in batch.request_ids]
        if not self._best:
            return found
        free = [i for i, member in enumerate(found) if member is None and batch.max_draft_tokens[i] > 0]
        due = [member for member in self._members if free and member.is_on and member.worth.try_now()]
        return [due.pop() if member is None and i in free and due else member for i, member in enumerate(found)]

    def record(self, outcome: DraftOutcome) -> None:
        """See `Proposer.record`: each member hears of its own drafts."""
        self._accepted = int(outcome.num_accepted_tokens.sum())
        servers = [self._served.get(request_id) for request_id in outcome.request_ids]
        for member in self._members:
            mine = np.array([i for i, server in enumerate(servers) if server is member], dtype=np.int64)
            if len(mine):
                member.record(outcome, mine)

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:
        """See `Proposer.complete`."""
        for member in self._members:
            member.guarded(lambda member=member: member.proposer.complete(request_id, token_ids))  # type: ignore[misc]

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._wanted.pop(request_id, None)
        self._served.pop(request_id, None)
        for member in self._members:
            member.guarded(lambda member=member: member.proposer.finish(request_id))  # type: ignore[misc]

    def close(self) -> None:
        """See `Proposer.close`."""
        for member in self._members:
            member.guarded(member.proposer.close)

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`: ``<member>/<purpose>``."""
        return {
            f"{member.name}/{purpose}": size for member in self._members for purpose, size in member.memory().items()
        }

    def stats(self) -> Mapping[str, Any]:
        """See `Proposer.stats`: counters of each member by its name."""
        return {"members": {member.name: member.stats() for member in self._members}}

    def _packed(self, drafts: Sequence[RequestDraft]) -> Draft:
        """One draft of those chosen; chains become trees, and certain tokens one-hot laws, where others need it."""
        tokens = torch.tensor([token for draft in drafts for token in draft.token_ids], dtype=torch.int64)
        parents = probs = None
        if any(draft.parents is not None for draft in drafts):
            nodes = [node for draft in drafts for node in (draft.parents or range(-1, len(draft) - 1))]
            parents = torch.tensor(nodes, dtype=torch.int32)
        if any(draft.probs is not None for draft in drafts):
            probs = self._laws(drafts)
        return Draft(
            token_ids=tokens,
            num_draft_tokens=torch.tensor([len(draft) for draft in drafts], dtype=torch.int32),
            parents=parents,
            draft_probs=probs,
        )

    def _laws(self, drafts: Sequence[RequestDraft]) -> torch.Tensor:
        """float32 [N, V]: the law of each draft token."""
        device = next(draft.probs.device for draft in drafts if draft.probs is not None)
        rows = []
        for draft in drafts:
            if draft.probs is not None:
                rows.append(draft.probs)
            elif len(draft):
                ids = torch.tensor(draft.token_ids, device=device)
                rows.append(torch.nn.functional.one_hot(ids, self._vocab_size).float())
        return torch.cat(rows)
