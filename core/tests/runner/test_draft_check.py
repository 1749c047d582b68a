"""What a proposer returns is checked before the engine takes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.errors import PluginContractError
from specdec.runner.draft_check import split_draft
from specdec.types import Draft, ProposerCapabilities

LIMITS = np.array([3, 3], dtype=np.int32)
TREES = ProposerCapabilities(trees=True)


def tree(parents: list[int]) -> Draft:
    """Three nodes of the first request, two of the second."""
    counts = torch.tensor([3, 2], dtype=torch.int32)
    return Draft(token_ids=torch.arange(5), num_draft_tokens=counts, parents=torch.tensor(parents, dtype=torch.int32))


def test_a_draft_is_split_by_request() -> None:
    first, second = split_draft(tree([-1, 0, 0, -1, 0]), LIMITS, 10, TREES)
    assert (first.token_ids, first.parents) == ([0, 1, 2], [-1, 0, 0])
    assert (second.token_ids, second.parents) == ([3, 4], [-1, 0])


@pytest.mark.parametrize("parents", [[-1, 1, 0, -1, 0], [-1, 0, 0, 0, 0], [-1, 0, 0, -1, 2], [-2, 0, 0, -1, 0]])
def test_a_parent_is_an_earlier_node_of_the_same_request(parents: list[int]) -> None:
    with pytest.raises(PluginContractError, match="parents must be -1 or an earlier node of the same request"):
        split_draft(tree(parents), LIMITS, 10, TREES)


@pytest.mark.parametrize(
    ("token_ids", "counts", "message"),
    [
        ([1, 2], [3, -1], r"num_draft_tokens \[3, -1\] must lie between 0 and max_draft_tokens \[3, 3\]"),
        ([1, 2, 3, 4], [4, 0], r"num_draft_tokens \[4, 0\] must lie between"),
        ([1, 2], [1, 2], "sums to 3, but there are 2 token_ids"),
        ([1, 10], [1, 1], r"token_ids from 1 to 10 leave the vocabulary 0\.\.9"),
        ([-1, 1], [1, 1], "token_ids from -1 to 1 leave"),
    ],
)
def test_counts_and_tokens_are_checked(token_ids: list[int], counts: list[int], message: str) -> None:
    draft = Draft(token_ids=torch.tensor(token_ids), num_draft_tokens=torch.tensor(counts, dtype=torch.int32))
    with pytest.raises(PluginContractError, match=message):
        split_draft(draft, LIMITS, 10, ProposerCapabilities())
