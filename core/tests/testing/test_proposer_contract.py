"""The contract of proposers passes a sound one and catches every planted fault."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.testing import LIES, ChainProposer, LyingProposer, RandomProposer, chain_draft
from specdec.testing.contracts import ProposerContract
from specdec.types import Draft, Needs, ProposalInput, ProposerCapabilities, RequestInfo

torch.set_num_threads(1)
VOCAB = ProposerContract.vocab_size
K = ProposerContract.num_speculative_tokens


class Counting(ChainProposer):
    """A sound proposer: counts on from the last token, with state for each request."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}

    def start(self, request: RequestInfo) -> None:
        self.started[request.request_id] = len(request.prompt_token_ids)

    def finish(self, request_id: str) -> None:
        del self.started[request_id]

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        return [(int(token_ids[-1]) + 1 + i) % VOCAB for i in range(max_draft_tokens)]


class TestCounting(ProposerContract):
    @pytest.fixture
    def proposer(self) -> Counting:
        return Counting()


class TestRandomTrees(ProposerContract):
    @pytest.fixture
    def proposer(self) -> RandomProposer:
        return RandomProposer(VOCAB, trees=True)


class FromHiddenStates(Counting):
    """A sound proposer that reads what the target computed, with draft probabilities."""

    needs = Needs(hidden_states=True, aux_layers=(1,))
    capabilities = ProposerCapabilities(draft_probs=True)

    def propose(self, batch: ProposalInput) -> Draft:
        assert batch.computed is not None
        target = batch.computed.target
        assert target.hidden_states is not None
        assert target.aux_hidden_states is not None
        row_of = {name: row for row, name in enumerate(batch.computed.request_ids)}
        rows_of_batch = [row_of[name] for name in batch.request_ids]
        last = batch.computed.kept[batch.computed.kept_start[1:][rows_of_batch] - 1]
        hidden = target.hidden_states[last] + target.aux_hidden_states[0][last]
        probs = torch.softmax(hidden @ torch.linspace(-1, 1, 32 * VOCAB).view(32, VOCAB), dim=1)
        counts = torch.from_numpy(np.minimum(batch.max_draft_tokens, 1))
        rows = counts.nonzero()[:, 0]
        return Draft(
            token_ids=probs.argmax(dim=1)[rows],
            num_draft_tokens=counts,
            draft_probs=probs[rows],
            confidence=probs.max(dim=1).values[rows],
        )


class TestFromHiddenStates(ProposerContract):
    shortest_text = 2

    @pytest.fixture
    def proposer(self) -> FromHiddenStates:
        return FromHiddenStates()


def run(contract: Any, check: str, subject: Any) -> None:
    """Run one check, with every set of its parameters, outside pytest."""
    function = getattr(contract, check)
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        function(subject(), **dict(zip(names, values, strict=True)))


# --- faults ------------------------------------------------------------------------------------


class IgnoresLimits(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        return chain_draft([[1] * K for _ in batch.request_ids])


class KeepsUndeclared(Counting):
    """Remembers completed texts without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[np.ndarray] = []

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:
        self.texts.append(token_ids.copy())

    def memory(self) -> dict[str, int]:
        return {"texts": sum(text.nbytes for text in self.texts)}


class KeepsNames(Counting):
    """Remembers which requests completed."""

    capabilities = ProposerCapabilities(keeps_finished_requests=True)

    def __init__(self) -> None:
        super().__init__()
        self.completed: list[str] = []

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:
        self.completed.append(request_id)


class WritesItsInput(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        for tokens in batch.token_ids:
            tokens.flags.writeable = True
            tokens[0] += 1
        return super().propose(batch)


class WritesTheLimits(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        batch.max_draft_tokens.flags.writeable = True
        batch.max_draft_tokens[:] = 0
        return draft


class WritesHiddenStates(FromHiddenStates):
    def propose(self, batch: ProposalInput) -> Draft:
        assert batch.computed is not None
        assert batch.computed.target.aux_hidden_states is not None
        batch.computed.target.aux_hidden_states[0].zero_()
        return super().propose(batch)


class DraftsByCall(Counting):
    calls = 0

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        self.calls += 1
        return [self.calls % VOCAB] * max_draft_tokens


class DraftsByPlace(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        return chain_draft([[i] * limit for i, limit in enumerate(batch.max_draft_tokens.tolist())])


class DraftsForTheFirst(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        last = [int(tokens[-1]) for tokens in batch.token_ids[:1]] * len(batch.token_ids)
        return chain_draft([[t] * limit for t, limit in zip(last, batch.max_draft_tokens.tolist(), strict=True)])


class RemembersTheText(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, np.ndarray] = {}

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        text = self.texts.setdefault(request_id, token_ids)
        return super().draft_for(request_id, text, max_draft_tokens)

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.texts.pop(request_id, None)


class NeverForgetsTheText(RemembersTheText):
    def finish(self, request_id: str) -> None:
        Counting.finish(self, request_id)


class MustBeAskedEveryStep(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, int] = {}

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        self.steps[request_id] = self.steps.get(request_id, len(token_ids) - 1) + 1
        return [self.steps[request_id] % VOCAB] * max_draft_tokens

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.steps.pop(request_id, None)


class KeepsTheId(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.log.append({"ended": request_id})


class KeepsMemory(Counting):
    kept = 0

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.kept += 100

    def memory(self) -> dict[str, int]:
        return {"kept": self.kept}


class ReportsFloats(Counting):
    def memory(self) -> dict[str, int]:
        return {"state": 1.5}  # type: ignore[dict-item]


class NeedsTwoTokens(Counting):
    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        return [int(token_ids[-2])] * max_draft_tokens


class FailsWithoutRequests(Counting):
    def propose(self, batch: ProposalInput) -> Draft:
        max(len(tokens) for tokens in batch.token_ids)
        return super().propose(batch)


class FailsOnLongTexts(Counting):
    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        buffer = np.zeros(ProposerContract.max_model_len)
        buffer[len(token_ids) + K - 1] = 1
        return super().draft_for(request_id, token_ids, max_draft_tokens)


class FailsToFinish(Counting):
    drafted: frozenset[str] = frozenset()

    def finish(self, request_id: str) -> None:
        if request_id not in self.drafted:
            raise KeyError(request_id)


class FailsToClose(Counting):
    def close(self) -> None:
        raise RuntimeError("requests are running")


class UndeclaredTrees(RandomProposer):
    def __init__(self) -> None:
        super().__init__(VOCAB, trees=True)

    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        self.capabilities = ProposerCapabilities()
        return draft


class UndeclaredProbs(FromHiddenStates):
    capabilities = ProposerCapabilities()


class ProbsMissTheToken(FromHiddenStates):
    def propose(self, batch: ProposalInput) -> Draft:
        draft = super().propose(batch)
        assert draft.draft_probs is not None
        draft.draft_probs.scatter_(1, draft.token_ids[:, None], 0.0)
        draft.draft_probs.div_(draft.draft_probs.sum(1, keepdim=True))
        return draft


FAULTS = [
    (IgnoresLimits, "test_limits"),
    (WritesItsInput, "test_inputs_unchanged"),
    (WritesTheLimits, "test_inputs_unchanged"),
    (WritesHiddenStates, "test_inputs_unchanged"),
    (DraftsByCall, "test_same_input_same_draft"),
    (DraftsByPlace, "test_neighbours_do_not_matter"),
    (DraftsForTheFirst, "test_neighbours_do_not_matter"),
    (RemembersTheText, "test_growing_text"),
    (RemembersTheText, "test_absent_requests"),
    (MustBeAskedEveryStep, "test_absent_requests"),
    (NeverForgetsTheText, "test_request_id_used_again"),
    (KeepsTheId, "test_nothing_kept_after_finish"),
    (KeepsMemory, "test_nothing_kept_after_finish"),
    (KeepsUndeclared, "test_completed_requests"),
    (KeepsNames, "test_completed_requests"),
    (ReportsFloats, "test_memory_is_reported"),
    (NeedsTwoTokens, "test_one_token_prompt"),
    (FailsWithoutRequests, "test_empty_batch"),
    (FailsOnLongTexts, "test_near_the_length_limit"),
    (FailsToFinish, "test_start_then_finish"),
    (FailsToClose, "test_close"),
    (UndeclaredTrees, "test_well_formed"),
    (UndeclaredProbs, "test_well_formed"),
    (ProbsMissTheToken, "test_well_formed"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_fault_is_caught(fault: Callable[[], Any], check: str) -> None:
    """Each planted fault fails the check that is there for it."""
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, RuntimeError)):
        run(ProposerContract(), check, fault)


@pytest.mark.parametrize("lie", LIES)
def test_lie_is_caught(lie: str) -> None:
    """Every way of lying fails the check of the draft's form."""
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        run(ProposerContract(), "test_well_formed", lambda: LyingProposer(lie, vocab_size=VOCAB))


def test_every_check_catches_something() -> None:
    """No check is idle: each has a fault above, or is one of packaging."""
    checks = {name for name, _ in inspect.getmembers(ProposerContract, inspect.isfunction) if name.startswith("test_")}
    packaging = {"test_plugin_imports_without_torch", "test_hooks_are_declared", "test_core_version_range"}
    assert checks - packaging == {check for _, check in FAULTS}
