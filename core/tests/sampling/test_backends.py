"""The compiled backend against the reference, for what plain draws and rejection sampling ask of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling import noise, sampler
from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.cpu.backend import CpuSampling
from specdec.sampling.noise import Purpose
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.torch_backend import TorchSampling

COMPILED, REFERENCE = CpuSampling(), TorchSampling()
VOCABULARIES = [1, 2, 7, 1000, 1024, 1025, 5000, 50_257]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


class Case:
    """Eleven entries over eight rows: sampled and greedy, one masked, one NaN, drafts with laws and one-hot."""

    def __init__(self, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + vocab_size)
        logits = torch.randn(8, vocab_size, generator=generator) * scale
        logits[1, ::2] = -torch.inf
        logits[1, vocab_size // 2] = 0.5
        logits[2] = -torch.inf
        logits[3, vocab_size // 2] = torch.nan
        logits[5, 0] = torch.inf
        logits[6] = 2.5  # all equal
        self.logits = logits.to(dtype)
        self.rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 6, 2])
        self.temperature = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.01, 2.0, 0.1, 100.0, 0.0, 0.0, 0.0])
        self.seeds = torch.randint(-(2**62), 2**62, (11,), generator=generator)
        self.positions = torch.randint(0, 2**40, (11,), generator=generator)
        self.keys = (self.temperature, self.seeds, self.positions)
        laws = torch.rand(7, vocab_size, generator=generator) * (torch.rand(7, vocab_size, generator=generator) < 0.5)
        laws[:, -1] += 1e-3
        self.laws = laws / laws.sum(dim=1, keepdim=True)
        self.law_rows = torch.tensor([0, 1, 2, 3, -1, 4, 5, -1, 0, 6, 2])
        self.drafted = torch.randint(0, vocab_size, (11,), generator=generator)
        self.drafted[4] = self.logits[4].argmax()
        self.drafted[9] = 0

    def statistics(self, backend: SamplingBackend = REFERENCE) -> RowStatistics:
        return backend.statistics(self.logits, self.temperature, self.rows)

    def accept(self, backend: SamplingBackend, laws: bool = True) -> list[bool]:
        drafts = {"draft_probs": self.laws, "draft_rows": self.law_rows} if laws else {}
        found = backend.accept(
            self.logits, self.statistics(), self.drafted, *self.keys, rows=self.rows, purpose=Purpose.ACCEPT, **drafts
        )
        return found.tolist()

    def recover(self, backend: SamplingBackend, laws: bool = True) -> list[int]:
        drafts = {"draft_probs": self.laws, "draft_rows": self.law_rows} if laws else {}
        return backend.recover(
            self.logits, self.statistics(), self.drafted, *self.keys, rows=self.rows, **drafts
        ).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_compiled_backend_gives_the_references_answers(vocab_size: int, dtype: torch.dtype, threads: int) -> None:
    case = Case(vocab_size, dtype)
    before = case.logits.clone()
    drawn = [backend.draw(case.logits, *case.keys, rows=case.rows).tolist() for backend in (COMPILED, REFERENCE)]
    assert drawn[0] == drawn[1]
    found, expected = case.statistics(COMPILED), case.statistics()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert [found.tokens[i].item() for i in (2, 3, 5, 10)] == [NO_TOKEN_LEFT, NAN_LOGITS, NAN_LOGITS, NO_TOKEN_LEFT]
    torch.testing.assert_close(found.log_normalizers, expected.log_normalizers, rtol=1e-7, atol=3e-7, equal_nan=True)
    for laws in (True, False):
        assert case.accept(COMPILED, laws) == case.accept(REFERENCE, laws)
        assert case.recover(COMPILED, laws) == case.recover(REFERENCE, laws)
    assert torch.equal(case.logits, before) or case.logits.isnan().any()


@settings(deadline=None, max_examples=40)
@given(
    vocab_size=st.integers(1, 3000),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 20.0, 1e4]),
    temperature=st.sampled_from([1.1e-5, 0.01, 0.6, 1.0, 3.0, 100.0]),
)
def test_recovery_equals_the_references_everywhere(
    vocab_size: int, seed: int, scale: float, temperature: float
) -> None:
    case = Case(vocab_size, seed=seed, scale=scale)
    case.temperature.masked_fill_(case.temperature > 0, temperature)
    assert case.recover(COMPILED) == case.recover(REFERENCE)
    assert case.recover(COMPILED, laws=False) == case.recover(REFERENCE, laws=False)
    assert case.accept(COMPILED) == case.accept(REFERENCE)


def test_few_rows_are_cut_into_ranges_with_the_same_result() -> None:
    """One row on four threads: the best of its ranges, lowest ids on ties, faults in any range."""
    torch.set_num_threads(4)
    keys = torch.zeros(1), torch.tensor([5]), torch.tensor([9])
    logits = torch.zeros(1, 5000)
    assert COMPILED.draw(logits, *keys).tolist() == [0]
    logits[0, [1700, 4900, 1024]] = 3.0
    assert COMPILED.draw(logits, *keys).tolist() == [1024]
    assert COMPILED.statistics(logits, torch.zeros(1)).tokens.tolist() == [1024]
    for place in (0, 2000, 4999):
        broken = logits.clone()
        broken[0, place] = torch.nan
        assert COMPILED.draw(broken, *keys).tolist() == [NAN_LOGITS]
        assert COMPILED.draw(broken, torch.ones(1), *keys[1:]).tolist() == [NAN_LOGITS]
    lonely = torch.full((1, 5000), -torch.inf)
    assert COMPILED.draw(lonely, torch.ones(1), *keys[1:]).tolist() == [NO_TOKEN_LEFT]
    lonely[0, 4998] = -7.0
    assert COMPILED.draw(lonely, torch.ones(1), *keys[1:]).tolist() == [4998]
    torch.set_num_threads(1)


@pytest.mark.parametrize("backend", [COMPILED, REFERENCE], ids=["compiled", "reference"])
def test_the_law_of_rejection_sampling(
    backend: SamplingBackend, chi_square_fits: Callable[[np.ndarray, np.ndarray], bool]
) -> None:
    """Drafts from Q, kept or replaced, are draws from P; with another recovery they are not."""
    count = 40_000 if backend is COMPILED else 20_000
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.3, -0.4, -torch.inf, 1.8]])
    temperature = torch.full((count,), 0.8)
    law = torch.softmax(logits[0].double() / 0.8, 0)
    draft = torch.softmax(torch.tensor([0.0, 1.0, 0.5, 1.0, -1.0, 0.0, 0.3, 0.2]), 0)
    seeds, positions = torch.full((count,), 77), torch.arange(count)
    rows = torch.zeros(count, dtype=torch.int64)
    drafted = noise.race(draft.log().expand(count, -1), torch.ones(count), seeds, positions, Purpose.DRAFT)[0]
    statistics = backend.statistics(logits, temperature, rows)
    laws = {"draft_probs": draft[None], "draft_rows": rows, "rows": rows}
    keys = (temperature, seeds, positions)
    accepted = backend.accept(logits, statistics, drafted, *keys, **laws)
    recovered = backend.recover(logits, statistics, drafted, *keys, **laws)
    out = torch.where(accepted, drafted, recovered)
    allowed = (law > 0).numpy()

    def fits(tokens: torch.Tensor) -> bool:
        counts = np.bincount(tokens.numpy(), minlength=8)
        assert counts[6] == 0
        return chi_square_fits(counts[allowed], law.numpy()[allowed])

    assert accepted.double().mean().item() == pytest.approx(torch.minimum(law, draft.double()).sum().item(), abs=0.02)
    assert fits(out)
    plain = backend.draw(logits, *keys, Purpose.RECOVER, rows=rows)
    assert not fits(torch.where(accepted, drafted, plain))
    one_hot = backend.accept(logits, statistics, drafted, *keys, rows=rows)
    replaced = backend.recover(logits, statistics, drafted, *keys, rows=rows)
    assert (replaced != drafted).all()
    assert fits(torch.where(one_hot, drafted, replaced))


def test_nothing_left_falls_back_to_the_target() -> None:
    """P = Q up to rounding, or all of P on the rejected token: the draw is from P."""
    logits = torch.randn(3, 50)
    logits[2] = -torch.inf
    logits[2, 7] = 1.0
    keys = torch.ones(3), torch.arange(3), torch.arange(3)
    for backend in (COMPILED, REFERENCE):
        statistics = backend.statistics(logits, torch.ones(3))
        laws = logits.softmax(dim=1) * 1.001
        found = backend.recover(logits, statistics, torch.tensor([3, 4, 7]), *keys, draft_probs=laws)
        assert found.tolist() == backend.draw(logits, *keys, Purpose.RECOVER).tolist()
        found = backend.recover(logits, statistics, torch.tensor([-1, -1, 7]), *keys)
        assert found.tolist() == backend.draw(logits, *keys, Purpose.RECOVER).tolist()


def test_impossible_drafts_are_rejected() -> None:
    """Ids outside the vocabulary, tokens the target masks, laws that give the token nothing."""
    logits = torch.zeros(4, 10)
    logits[1, 2] = -torch.inf
    tokens = torch.tensor([-1, 2, 10, 5])
    laws = torch.full((4, 10), 0.1)
    laws[3, 5] = 0.0
    keys = torch.ones(4), torch.arange(4), torch.arange(4)
    for backend in (COMPILED, REFERENCE):
        statistics = backend.statistics(logits, torch.ones(4))
        assert backend.accept(logits, statistics, tokens, *keys, draft_probs=laws).tolist() == [False] * 4


def test_a_device_uses_the_backend_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_backends", {})
    assert sampler.backend_of("cpu").name == "cpu"
    assert sampler.backend_of("meta").name == "torch"
    sampler.use_backend("cpu", REFERENCE)
    assert sampler.backend_of("cpu") is REFERENCE


def test_supports_names_the_device() -> None:
    assert COMPILED.supports("cpu") == []
    assert "cuda" in COMPILED.supports("cuda")[0]
    assert REFERENCE.supports("cuda") == []
