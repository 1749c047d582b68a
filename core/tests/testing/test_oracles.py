"""Each oracle drafts what it says it does."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from specdec.errors import ProposerError
from specdec.testing import (
    LIES,
    GappyProposer,
    LyingProposer,
    OracleProposer,
    RaisingProposer,
    RandomProposer,
    SelfProposer,
    SlowProposer,
    WrongProposer,
    tiny_model,
    tiny_module,
    use_proposer,
)
from specdec.testing.contracts import check_draft
from specdec.testing.reference import greedy_reference
from specdec.types import Draft, ProposalInput

torch.set_num_threads(1)
RUN = [3, 1, 4, 1, 5, 9, 2, 6]


def batch(*texts: list[int], limit: int = 3) -> ProposalInput:
    return ProposalInput(
        request_ids=tuple(f"r{i}" for i in range(len(texts))),
        token_ids=tuple(np.array(text, dtype=np.int64) for text in texts),
        max_draft_tokens=np.full(len(texts), limit, dtype=np.int32),
        seeds=tuple(range(len(texts))),
    )


def rows(draft: Draft) -> list[list[int]]:
    return [row.tolist() for row in torch.split(draft.token_ids, draft.num_draft_tokens.tolist())]


def test_oracle_replays_runs() -> None:
    """All right by default, and nothing past the end of a run or for a text that is none's beginning."""
    oracle = OracleProposer([RUN, [7, 7, 8, 8]], vocab_size=10)
    assert rows(oracle.propose(batch(RUN[:2], [7, 7], RUN[:7], [5, 5]))) == [[4, 1, 5], [8, 8], [6], []]


def test_oracle_is_right_for_some_tokens() -> None:
    """After ``right`` tokens come wrong ones, up to the limit, and also past the end of a run."""
    oracle = OracleProposer([RUN], vocab_size=10, right=1)
    assert rows(oracle.propose(batch(RUN[:2]))) == [[4, 2, 6]]
    assert rows(oracle.propose(batch(RUN[:4]))) == [[5, 0, 3]]
    assert rows(oracle.propose(batch(RUN))) == [[0, 1, 1]]
    assert rows(OracleProposer([RUN], vocab_size=10, right=0).propose(batch(RUN[:2]))) == [[5, 2, 6]]


def test_oracle_finds_the_run_again() -> None:
    """Where runs part, a request's draft follows the one it took."""
    oracle = OracleProposer([[1, 2, 3, 4], [1, 2, 5, 6]], vocab_size=10)
    assert rows(oracle.propose(batch([1]))) == [[2, 3, 4]]
    assert rows(oracle.propose(batch([1, 2, 5]))) == [[6]]
    oracle.finish("r0")
    assert rows(oracle.propose(batch([1, 2]))) == [[3, 4]]


def test_self_is_the_target(tmp_path: object) -> None:
    """The draft is what the target decodes greedily, given the module or its directory."""
    model = tiny_module("llama", vocab_size=64)
    want, _ = greedy_reference(model, [5, 6, 7], 3)
    assert rows(SelfProposer(model).propose(batch([5, 6, 7]))) == [want]
    path = tiny_model("llama", str(tmp_path), vocab_size=64)
    assert rows(SelfProposer(path).propose(batch([5, 6, 7]))) == [want]


def test_wrong() -> None:
    """One id, up to the limit."""
    assert rows(WrongProposer(5).propose(batch([1], [2, 2], limit=2))) == [[5, 5], [5, 5]]


@pytest.mark.parametrize("trees", [False, True])
def test_random_is_well_formed(trees: bool) -> None:
    """Ids, lengths and trees vary, and the same text gives the same draft."""
    proposer = RandomProposer(50, trees=trees)
    texts = batch(*([1] * n for n in range(1, 40)), limit=5)
    draft = proposer.propose(texts)
    check_draft(draft, texts, 50, proposer.capabilities)
    assert (draft.parents is not None) == trees
    assert set(draft.num_draft_tokens.tolist()) == set(range(6))
    assert rows(draft) == rows(RandomProposer(50, trees=trees).propose(texts))


def test_gappy() -> None:
    """Every other step is empty."""
    proposer = GappyProposer(WrongProposer(5))
    assert [rows(proposer.propose(batch([1], limit=1))) for _ in range(4)] == [[[]], [[5]], [[]], [[5]]]


def test_raising() -> None:
    """Every n-th call raises."""
    proposer = RaisingProposer(WrongProposer(5), every=2, error=lambda: ZeroDivisionError("planted"))
    assert rows(proposer.propose(batch([1], limit=1))) == [[5]]
    with pytest.raises(ZeroDivisionError, match="planted"):
        proposer.propose(batch([1], limit=1))
    with pytest.raises(ProposerError):
        RaisingProposer(WrongProposer(5)).propose(batch([1]))


def test_slow() -> None:
    """The draft comes late."""
    begin = time.perf_counter()
    assert rows(SlowProposer(WrongProposer(5), 0.02).propose(batch([1], limit=1))) == [[5]]
    assert time.perf_counter() - begin >= 0.02


@pytest.mark.parametrize("lie", LIES)
def test_lies_break_the_contract(lie: str) -> None:
    """Nothing that is returned passes for a draft."""
    proposer, asked = LyingProposer(lie, vocab_size=10), batch([1, 2], [3])
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        check_draft(proposer.propose(asked), asked, 10, proposer.capabilities)


def test_unknown_lie() -> None:
    """A misspelt lie is told."""
    with pytest.raises(ValueError, match="ids_negative"):
        LyingProposer("ids_negativ", vocab_size=10)


def test_use_proposer() -> None:
    """Keyword arguments for an engine: the object and the draft length."""
    proposer = WrongProposer(1)
    assert use_proposer(proposer, 3) == {
        "proposer": proposer,
        "speculative_config": {"num_speculative_tokens": 3, "speculation": "always"},
    }
