"""Drafts that wait for their step are cut to what fits."""

from __future__ import annotations

import torch

from specdec.engine.request import RequestDraft


def test_a_chain_no_deeper_than_its_tokens() -> None:
    chain = RequestDraft([5, 6, 7], None, torch.eye(3), num_forced=1)
    assert chain.no_deeper_than(3) is chain
    cut = chain.no_deeper_than(2)
    assert (cut.token_ids, cut.num_forced) == ([5, 6], 0)
    assert cut.probs is not None
    assert torch.equal(cut.probs, torch.eye(3)[:2])


def test_a_tree_keeps_all_nodes_of_its_upper_levels() -> None:
    tree = RequestDraft([1, 2, 3, 4, 5, 6], [-1, 0, 1, -1, 3, 4], torch.arange(6.0)[:, None])
    assert tree.no_deeper_than(3) is tree
    cut = tree.no_deeper_than(2)
    assert (cut.token_ids, cut.parents) == ([1, 2, 4, 5], [-1, 0, -1, 2])
    assert cut.probs is not None
    assert cut.probs[:, 0].tolist() == [0.0, 1.0, 3.0, 4.0]
    roots = tree.no_deeper_than(1)
    assert (roots.token_ids, roots.parents) == ([1, 4], [-1, -1])
