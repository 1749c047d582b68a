"""The method `composite`: for each request and step one of several proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.engine.request import NO_DRAFT, RequestDraft
from specdec.types import Draft, Needs, ProposerCapabilities

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
                accepted.
            vocab_size: the target's.
        """
        self._members = list(members)
        self._best = choose == "best"
        self._vocab_size = vocab_size
        self._wanted: dict[str, str] = {}
        self._served: dict[str, Member] = {}
        self.methods = tuple([member.name for member in members])
        needs = [member.proposer.needs for member in members]
        self.needs = Needs(
            token_history=any(need.token_history for need in needs),
            hidden_states=any(need.hidden_states for need in needs),
            every_step=any(need.every_step for need in needs),
            lookahead_slots=max(need.lookahead_slots for need in needs),
            next_token=any(need.next_token for need in needs),
            aux_layers=tuple(sorted({layer for need in needs for layer in need.aux_layers})),
        )
        given = [member.proposer.capabilities for member in members]
        self.capabilities = ProposerCapabilities(
            trees=any(one.trees for one in given),
            draft_probs=any(one.draft_probs for one in given),
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
        drafts = [NO_DRAFT] * len(batch.request_ids)
        expected = np.zeros(len(drafts))
        for request_id in batch.request_ids:
            self._served.pop(request_id, None)
        for member in self._members:
            chosen = self._takers(member, batch, drafts)
            if not chosen and not member.proposer.needs.every_step:
                continue
            found = member.draft(batch, chosen, self._vocab_size, self.needs.aux_layers)
            if found is None:
                continue
            promise = member.expected_tokens()
            for i, draft in zip(chosen, found, strict=True):
                limit = min(int(batch.max_draft_tokens[i]), member.max_draft_tokens)
                if len(draft) and promise[_judged_length(draft, limit)] > expected[i]:
                    drafts[i], expected[i] = draft, promise[_judged_length(draft, limit)]
                    self._served[batch.request_ids[i]] = member
        return self._packed(drafts)

    def record(self, outcome: DraftOutcome) -> None:
        """See `Proposer.record`: each member hears of its own drafts."""
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

    def _takers(self, member: Member, batch: ProposalInput, drafts: Sequence[RequestDraft]) -> list[int]:
        """The requests that a member is asked about."""
        if not member.is_on:
            return []
        return [
            i
            for i, request_id in enumerate(batch.request_ids)
            if batch.max_draft_tokens[i] > 0
            and self._wanted.get(request_id, member.name) == member.name
            and (self._best or not len(drafts[i]))
        ]

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


def _judged_length(draft: RequestDraft, limit: int) -> int:
    """What a draft is preferred by: its depth, or ``limit`` where the tokens were drawn from the laws it comes with.

    Where drawn drafts end may depend on their tokens. Preferring the long ones would be preferring some tokens, and
    those that are left would no longer have the law that verifiers are told.
    """
    return _depth(draft) if draft.probs is None else limit


def _depth(draft: RequestDraft) -> int:
    """The most tokens of a draft that can be accepted."""
    if draft.parents is None:
        return len(draft)
    depth: list[int] = []
    for parent in draft.parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return max(depth)
