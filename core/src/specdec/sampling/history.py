"""Which drafted tokens come before a row, for every option that depends on what was said before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.types import PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from specdec.sampling.batch import RowLayout
    from specdec.types import Draft


def drafted_before(layout: RowLayout, draft: Draft) -> Tensor:
    """The draft tokens between the last committed token and each row, nearest first.

    For chains those are the tokens drafted before the row, for trees the node the row follows and its ancestors.

    Args:
        layout: the step's rows.
        draft: the draft tokens scored in this step; row i of a request follows its node i - 1.

    Returns:
        int64 [R, D] with D = ``layout.max_depth``, padded on the right with -1.
    """
    num_rows = layout.request_index.shape[0]
    device = layout.request_index.device
    depth = layout.max_depth
    if depth == 0 or draft.token_ids.shape[0] == 0:
        return torch.full((num_rows, depth), PLACEHOLDER_TOKEN_ID, dtype=torch.int64, device=device)
    offset = torch.arange(num_rows, device=device) - layout.row_start[layout.request_index]
    # A request with k draft tokens has k + 1 rows, so row j of request r follows draft token j - r - 1.
    first_draft = layout.row_start[layout.request_index] - layout.request_index
    if draft.parents is None:
        node = offset[:, None] - 1 - torch.arange(depth, device=device)
    else:
        node = _ancestors(offset - 1, first_draft, draft.parents, depth)
    known = node >= 0
    tokens = draft.token_ids[(node + first_draft[:, None]).clamp(0, draft.token_ids.shape[0] - 1)]
    return tokens.where(known, PLACEHOLDER_TOKEN_ID)


def _ancestors(node: Tensor, first_draft: Tensor, parents: Tensor, depth: int) -> Tensor:
    """[R, depth] node indices within the request: ``node`` and its ancestors, then -1."""
    path = [node]
    for _ in range(depth - 1):
        above = parents[(node + first_draft).clamp(0, parents.shape[0] - 1)].long()
        node = above.where(node >= 0, -1)
        path.append(node)
    return torch.stack(path, dim=1)
