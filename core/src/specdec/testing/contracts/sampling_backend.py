"""The contract of `specdec.sampling.backend.SamplingBackend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from specdec.sampling.noise import Purpose
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.torch_backend import TorchSampling
from specdec.testing.contracts.base import PluginContract
from specdec.testing.steps import RandomStep, runs_of

if TYPE_CHECKING:
    from specdec.sampling.backend import RowStatistics, SamplingBackend

VOCABULARIES = (1, 2, 7, 1000, 1025, 5000)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 0, 6, 2)
"""Which of the eight rows each of eleven entries reads."""
TEMPERATURES = (1.0, 0.5, 1.0, 1.0, 0.01, 2.0, 0.1, 100.0, 0.0, 0.0, 0.0)
LAW_ROWS = (0, 1, 2, 3, -1, 4, 5, -1, 0, 6, 2)
"""Which of seven draft laws each entry's token was drawn from; -1: a one-hot draft."""


class SamplingBackendContract(PluginContract):
    """What every sampling backend must hold to: the tokens of the reference. A subclass gives the fixture `backend`."""

    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def backend(self) -> SamplingBackend:
        """The backend to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'backend'")

    def case(self, vocab_size: int, dtype: torch.dtype = torch.float32) -> SamplingCase:
        """Rows of every kind on this contract's device."""
        return SamplingCase(vocab_size, dtype, self.device)

    def reference(self) -> SamplingBackend:
        """The backend whose answers are right."""
        return TorchSampling()

    # --- checks -----------------------------------------------------------------------------------

    def test_declares_what_it_is(self, backend: SamplingBackend) -> None:
        """A name, a priority, and reasons as sentences where it cannot serve."""
        assert backend.name
        assert isinstance(backend.priority, int)
        assert backend.supports(self.device) == []
        reasons = backend.supports("abacus")
        assert isinstance(reasons, list)
        assert all(isinstance(reason, str) and reason for reason in reasons)

    def test_warm_up(self, backend: SamplingBackend) -> None:
        """Warming up twice does no harm."""
        backend.warm_up()
        backend.warm_up()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("vocab_size", VOCABULARIES)
    def test_draws(self, backend: SamplingBackend, vocab_size: int, dtype: torch.dtype) -> None:
        """Plain draws are the reference's, sampled and greedy; bad rows give codes."""
        case = self.case(vocab_size, dtype)
        drawn = case.draw(backend)
        assert drawn == case.draw(self.reference())
        assert [drawn[entry] for entry in (2, 3, 10)] == [NO_TOKEN_LEFT, NAN_LOGITS, NO_TOKEN_LEFT]

    def test_purposes_have_noise_of_their_own(self, backend: SamplingBackend) -> None:
        """The stream of noise is the one that was named."""
        case = self.case(1000)
        for purpose in Purpose:
            assert case.draw(backend, purpose) == case.draw(self.reference(), purpose), purpose.name

    def test_all_rows_without_indices(self, backend: SamplingBackend) -> None:
        """Without indices entry e is row e."""
        case = self.case(1000)
        heat, seeds, positions = (key[:8] for key in case.keys)
        drawn = [one.draw(case.logits, heat, seeds, positions).tolist() for one in (backend, self.reference())]
        assert drawn[0] == drawn[1]

    def test_ties_take_the_lowest_id(self, backend: SamplingBackend) -> None:
        """Of equal logits the first wins at temperature 0."""
        logits = torch.zeros(1, 3000, device=self.device)
        logits[0, [1700, 2900, 1024]] = 3.0
        seed, position = torch.tensor([5], device=self.device), torch.tensor([9], device=self.device)
        assert backend.draw(logits, torch.zeros(1, device=self.device), seed, position).tolist() == [1024]

    @pytest.mark.parametrize("vocab_size", VOCABULARIES)
    def test_statistics(self, backend: SamplingBackend, vocab_size: int) -> None:
        """Largest tokens and normalizers are the reference's."""
        case = self.case(vocab_size)
        got, want = case.statistics(backend), case.statistics(self.reference())
        assert got.tokens.tolist() == want.tokens.tolist()
        torch.testing.assert_close(
            got.log_normalizers.double(), want.log_normalizers.double(), rtol=1e-6, atol=1e-6, equal_nan=True
        )

    @pytest.mark.parametrize("laws", [True, False], ids=["laws", "one-hot"])
    @pytest.mark.parametrize("vocab_size", VOCABULARIES)
    def test_accepts(self, backend: SamplingBackend, vocab_size: int, laws: bool) -> None:
        """The draft tokens that the reference accepts are accepted."""
        case = self.case(vocab_size)
        assert case.accept(backend, self.reference(), laws) == case.accept(self.reference(), self.reference(), laws)

    @pytest.mark.parametrize("laws", [True, False], ids=["laws", "one-hot"])
    @pytest.mark.parametrize("vocab_size", VOCABULARIES)
    def test_recovers(self, backend: SamplingBackend, vocab_size: int, laws: bool) -> None:
        """The token in a rejected one's place is the reference's."""
        case = self.case(vocab_size)
        assert case.recover(backend, self.reference(), laws) == case.recover(self.reference(), self.reference(), laws)

    def test_impossible_drafts_are_rejected(self, backend: SamplingBackend) -> None:
        """Ids outside the vocabulary, tokens the target masks, laws that give the token nothing."""
        logits = torch.zeros(4, 10, device=self.device)
        logits[1, 2] = -torch.inf
        laws = torch.full((4, 10), 0.1, device=self.device)
        laws[3, 5] = 0.0
        tokens = torch.tensor([-1, 2, 10, 5], device=self.device)
        keys = [key.to(self.device) for key in (torch.ones(4), torch.arange(4), torch.arange(4))]
        statistics = self.reference().statistics(logits, keys[0])
        assert backend.accept(logits, statistics, tokens, *keys, draft_probs=laws).tolist() == [False] * 4

    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_matches_whole_steps(self, backend: SamplingBackend, trees: bool) -> None:
        """A backend that verifies whole steps by `match` finds the runs that the reference's draws lead to."""
        for seed in range(4):
            step = RandomStep.of(seed, 7 + 700 * seed, trees=trees, device=self.device)
            verdict = backend.match(step.rows, step.draft, step.sampling)
            assert verdict is None or runs_of(verdict) == step.matched(self.reference())

    @pytest.mark.parametrize("laws", [True, False], ids=["laws", "one-hot"])
    def test_rejects_whole_steps(self, backend: SamplingBackend, laws: bool) -> None:
        """A backend that verifies whole steps by `rejection` finds the runs that the reference's answers lead to."""
        for seed in range(4):
            step = RandomStep.of(seed, 7 + 700 * seed, laws=laws, device=self.device)
            verdict = backend.reject(step.rows, step.draft, step.sampling)
            assert verdict is None or runs_of(verdict) == step.rejected(self.reference())

    def test_inputs_unchanged(self, backend: SamplingBackend) -> None:
        """Logits, keys and laws are only read."""
        case = self.case(1000)
        given = [case.logits, case.laws, case.drafted, case.rows, case.law_rows, *case.keys]
        before = [tensor.clone() for tensor in given]
        case.draw(backend)
        case.statistics(backend)
        case.accept(backend, self.reference(), True)
        case.recover(backend, self.reference(), True)
        for tensor, copy in zip(given, before, strict=True):
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


class SamplingCase:
    """Eleven entries over eight rows: sampled and greedy, masked, NaN, infinite, equal; laws and one-hot drafts."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = 3 * torch.randn(8, vocab_size, generator=generator)
        logits[1, ::2] = -torch.inf
        logits[1, vocab_size // 2] = 0.5
        logits[2] = -torch.inf
        logits[3, vocab_size // 2] = torch.nan
        logits[5, 0] = torch.inf
        logits[6] = 2.5
        laws = torch.rand(7, vocab_size, generator=generator) * (torch.rand(7, vocab_size, generator=generator) < 0.5)
        laws[:, -1] += 1e-3
        drafted = torch.randint(0, vocab_size, (11,), generator=generator)
        drafted[4] = logits[4].argmax()
        drafted[9] = 0
        self.logits = logits.to(device=device, dtype=dtype)
        self.rows = torch.tensor(ROWS, device=device)
        self.laws = (laws / laws.sum(dim=1, keepdim=True)).to(device)
        self.law_rows = torch.tensor(LAW_ROWS, device=device)
        self.drafted = drafted.to(device)
        self.keys = (
            torch.tensor(TEMPERATURES, device=device),
            torch.randint(-(2**62), 2**62, (11,), generator=generator).to(device),
            torch.randint(0, 2**40, (11,), generator=generator).to(device),
        )

    def draw(self, backend: SamplingBackend, purpose: int = Purpose.SAMPLE) -> list[int]:
        """Tokens or codes."""
        found: list[int] = backend.draw(self.logits, *self.keys, purpose, rows=self.rows).tolist()
        return found

    def statistics(self, backend: SamplingBackend) -> RowStatistics:
        """Of all entries."""
        return backend.statistics(self.logits, self.keys[0], self.rows)

    def accept(self, backend: SamplingBackend, reference: SamplingBackend, laws: bool) -> list[bool]:
        """Verdicts on the draft tokens, given the reference's statistics."""
        statistics = self.statistics(reference)
        found: list[bool] = backend.accept(
            self.logits, statistics, self.drafted, *self.keys, rows=self.rows, **self._drafts(laws)
        ).tolist()
        return found

    def recover(self, backend: SamplingBackend, reference: SamplingBackend, laws: bool) -> list[int]:
        """What takes the place of the draft tokens, given the reference's statistics."""
        statistics = self.statistics(reference)
        found: list[int] = backend.recover(
            self.logits, statistics, self.drafted, *self.keys, rows=self.rows, **self._drafts(laws)
        ).tolist()
        return found

    def _drafts(self, laws: bool) -> dict[str, Any]:
        return {"draft_probs": self.laws, "draft_rows": self.law_rows} if laws else {}
