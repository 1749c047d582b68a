"""Chains: lengths, order of calls, confidence, probabilities, rows that give no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.drafting.kit import ChainDrafter, DraftSampler
from specdec.sampling.params import SamplingParams
from specdec.types import ProposalInput

VOCAB = 11


def proposal(count: int, temperature: float = 0.0) -> ProposalInput:
    return ProposalInput(
        request_ids=tuple(str(i) for i in range(count)),
        token_ids=tuple(np.arange(i + 2) for i in range(count)),
        max_draft_tokens=np.full(count, 4, dtype=np.int32),
        sampling=(SamplingParams(temperature=temperature),) * count,
        seeds=tuple(range(count)),
    )


def peaked(tokens: torch.Tensor, height: float = 5.0) -> torch.Tensor:
    """Logits whose largest is at the token after each."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB) * height


def run(drafter: ChainDrafter, limits: list[int], first: list[int], temperature: float = 0.0) -> tuple[Any, list[Any]]:
    calls: list[Any] = []

    def next_logits(token_ids: torch.Tensor, chosen: np.ndarray, depth: int) -> torch.Tensor:
        calls.append((token_ids.tolist(), chosen.tolist(), depth))
        return peaked(token_ids)

    wanted = torch.tensor([token for token, limit in zip(first, limits, strict=True) if limit], dtype=torch.int64)
    chains = drafter.run(proposal(len(limits), temperature), np.array(limits), peaked(wanted), next_logits)
    return chains.draft(), calls


def test_each_request_gets_its_own_length() -> None:
    """The last token of a draft is not run, and requests leave the batch when theirs is drawn."""
    drafter = ChainDrafter(DraftSampler("greedy"), vocab_size=VOCAB)
    draft, calls = run(drafter, [2, 0, 1, 3], [0, 3, 5, 7])
    assert draft.token_ids.tolist() == [1, 2, 6, 8, 9, 10]
    assert draft.num_draft_tokens.tolist() == [2, 0, 1, 3]
    assert calls == [([1, 8], [0, 3], 0), ([9], [3], 1)]
    assert draft.draft_probs is None
    assert draft.confidence is None


@pytest.mark.parametrize("limits", [[0, 0], []])
def test_nothing_to_draft(limits: list[int]) -> None:
    draft, calls = run(ChainDrafter(DraftSampler("greedy"), vocab_size=VOCAB), limits, [1] * len(limits))
    assert draft.num_draft_tokens.tolist() == limits
    assert draft.token_ids.tolist() == calls == []


def test_a_draft_ends_before_the_doubtful_token() -> None:
    """Also before the first; the law is looked at before it is drawn from."""
    drafter = ChainDrafter(DraftSampler("greedy"), vocab_size=VOCAB, confidence_threshold=0.5)

    def next_logits(token_ids: torch.Tensor, chosen: np.ndarray, depth: int) -> torch.Tensor:
        return peaked(token_ids, 5.0 if depth < 1 else 1.0)

    first = torch.stack([peaked(torch.tensor(0)), peaked(torch.tensor(4), 1.0)])
    chains = drafter.run(proposal(2), np.array([4, 4]), first, next_logits)
    draft = chains.draft()
    assert draft.num_draft_tokens.tolist() == [2, 0]
    assert draft.token_ids.tolist() == [1, 2]
    expected = peaked(torch.tensor([0, 1])).float().softmax(-1).amax(-1)
    assert draft.confidence is not None
    torch.testing.assert_close(draft.confidence, expected)


def test_probabilities_lie_beside_their_tokens() -> None:
    drafter = ChainDrafter(DraftSampler("probabilistic"), vocab_size=VOCAB + 2)
    draft, calls = run(drafter, [1, 3], [0, 7], temperature=2.0)
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (4, VOCAB + 2)
    before = torch.tensor([0, 7, calls[0][0][0], calls[1][0][0]])
    law = (peaked(before).float() / 2.0).softmax(-1)
    torch.testing.assert_close(draft.draft_probs[:, :VOCAB], law)
    assert not draft.draft_probs[:, VOCAB:].any()


def test_a_row_without_a_token_ends_its_draft() -> None:
    drafter = ChainDrafter(DraftSampler("greedy"), vocab_size=VOCAB)

    def next_logits(token_ids: torch.Tensor, chosen: np.ndarray, depth: int) -> torch.Tensor:
        assert bool((token_ids >= 0).all())
        logits = peaked(token_ids).float()
        logits[0] = torch.nan
        return logits

    draft = drafter.run(proposal(2), np.array([3, 3]), peaked(torch.tensor([0, 5])), next_logits).draft()
    assert draft.num_draft_tokens.tolist() == [1, 3]
    assert draft.token_ids.tolist() == [1, 6, 7, 8]


def test_reduced_vocabularies_give_target_ids() -> None:
    ids = torch.arange(VOCAB) * 3
    drafter = ChainDrafter(DraftSampler("greedy"), vocab_size=40, to_target_ids=lambda own: ids[own])
    draft, calls = run(drafter, [1], [4])
    assert draft.token_ids.tolist() == [15]
    assert calls == []
