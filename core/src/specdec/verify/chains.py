"""Where a step's draft tokens are: in the packed order of the draft, and as chains in padded lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from specdec.types import PLACEHOLDER_TOKEN_ID, Verdict

if TYPE_CHECKING:
    from specdec.types import Draft, Rows


@frozen(eq=False, kw_only=True)
class Chains:
    """The draft chains of a step with at least one draft token; K is the most draft tokens of any request.

    Entries past a request's own are indices of someone else's: mask with ``present``.
    """

    owner: Tensor
    """int64 [N]: the request of each draft token."""
    node_rows: Tensor
    """int64 [N]: the logits row that decides on each draft token, the one before its own."""
    counts: Tensor
    """int64 [B]: draft tokens of each request."""
    rows: Tensor
    """int64 [B, K + 1]: its rows; column i follows draft token i - 1."""
    nodes: Tensor
    """int64 [B, K]: its draft tokens, as indices into the N."""
    token_ids: Tensor
    """int64 [B, K]."""
    present: Tensor
    """bool [B, K]: whether there is such a draft token."""

    @classmethod
    def of(cls, rows: Rows, draft: Draft) -> Chains:
        """Look them up without asking the device."""
        counts = draft.num_draft_tokens.long()
        first_row = rows.row_start[:-1].long()
        owner = owners(draft)
        place = torch.arange(longest_draft(rows, draft) + 1, device=counts.device)
        # Request r has one row more than draft tokens, so its first draft token is number first_row[r] - r.
        first_node = first_row - torch.arange(rows.num_requests, device=counts.device)
        nodes = (first_node[:, None] + place[:-1]).clamp(max=len(owner) - 1)
        return cls(
            owner=owner,
            node_rows=torch.arange(len(owner), device=owner.device) + owner,
            counts=counts,
            rows=(first_row[:, None] + place).clamp(max=rows.request_index.shape[0] - 1),
            nodes=nodes,
            token_ids=draft.token_ids[nodes],
            present=place[:-1] < counts[:, None],
        )

    def accepted(self, accepts: Tensor) -> Tensor:
        """int64 [B]: how many draft tokens stay when each is kept if ``accepts`` (bool [B, K]) and those before are."""
        return (accepts & self.present).long().cumprod(dim=1).sum(dim=1)

    def row_after(self, num_accepted: Tensor) -> Tensor:
        """int64 [B]: the row of the token after the accepted ones."""
        return self.rows.gather(1, num_accepted[:, None])[:, 0]

    def node_after(self, num_accepted: Tensor) -> Tensor:
        """int64 [B]: the first draft token that was not accepted; anything for requests that have none."""
        return self.nodes.gather(1, num_accepted.clamp(max=self.nodes.shape[1] - 1)[:, None])[:, 0]

    def verdict(self, num_accepted: Tensor, last: Tensor) -> Verdict:
        """The accepted draft tokens (int64 [B] of each) and the token after them, int64 [B]."""
        tokens = torch.nn.functional.pad(self.token_ids, (0, 1))
        place = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = torch.where(place == num_accepted[:, None], last[:, None], tokens)
        return Verdict(
            token_ids=tokens.masked_fill(place > num_accepted[:, None], PLACEHOLDER_TOKEN_ID),
            num_tokens=(num_accepted + 1).int(),
        )


def owners(draft: Draft) -> Tensor:
    """int64 [N]: the request of each draft token, without asking the device."""
    counts = draft.num_draft_tokens.long()
    requests = torch.arange(len(counts), device=counts.device)
    return torch.repeat_interleave(requests, counts, output_size=draft.token_ids.shape[0])


def longest_draft(rows: Rows, draft: Draft) -> int:
    """The most draft tokens any request can have accepted, known without asking the device."""
    if rows.max_draft_tokens is not None:
        return rows.max_draft_tokens
    on_host = draft.num_draft_tokens.device.type == "cpu"
    return int(draft.num_draft_tokens.max()) if on_host else draft.token_ids.shape[0]


def verdict_without_drafts(samples: Tensor, draft: Draft) -> Verdict:
    """The verdict of a step in which no request has a draft: ``samples`` int64 [B], one row per request."""
    num_requests = samples.shape[0]
    return Verdict(
        token_ids=samples[:, None],
        num_tokens=torch.ones(num_requests, dtype=torch.int32, device=samples.device),
        accepted_nodes=None if draft.parents is None else draft.parents.new_empty(num_requests, 0),
    )
