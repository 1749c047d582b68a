"""The kernels against the reference in torch: in Triton's interpreter on a CPU, or compiled on a GPU (`pytest -m gpu`).

Winners must be the reference's, except where the two best scores lie within 1e-5 of one another; those are counted, and
here there are none.
"""

from __future__ import annotations

import pytest
import torch

from specdec.sampling import noise
from specdec.sampling.backend import RowStatistics
from specdec.sampling.noise import Purpose
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.torch_backend import TorchSampling
from specdec_kernels_triton import kernels
from specdec_kernels_triton.backend import INTERPRETED, TritonSampling

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LARGE_TILES = TritonSampling(32_768 if INTERPRETED else 4096)
SMALL_TILES = TritonSampling(16)
REFERENCE = TorchSampling()
VOCABULARIES = [1, 2, 1000, 32_000, 50_257, 151_936, 262_144]


class Case:
    """Rows for every kind of answer; few of them, since an interpreted program takes a tenth of a second."""

    def __init__(self, vocab_size: int, dtype: torch.dtype = torch.float32, rows: int = 6) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(6, vocab_size, generator=generator) * 4
        logits[1, ::2] = -torch.inf
        logits[1, vocab_size // 2] = 0.5
        logits[2] = 2.5  # all equal
        logits[3, vocab_size // 2] = torch.nan
        logits[4] = -torch.inf
        self.logits = logits.to(DEVICE, dtype)[:rows]
        self.temperature = torch.tensor([1.0, 0.6, 0.0, 1.0, 1.0, 0.0], device=DEVICE)[:rows]
        self.seeds = torch.randint(-(2**62), 2**62, (6,), generator=generator).to(DEVICE)[:rows]
        self.positions = torch.randint(0, 2**40, (6,), generator=generator).to(DEVICE)[:rows]
        self.keys = (self.temperature, self.seeds, self.positions)
        laws = torch.rand(rows, vocab_size, generator=generator)
        self.laws = (laws / laws.sum(dim=1, keepdim=True)).to(DEVICE)
        self.drafted = torch.randint(0, vocab_size, (6,), generator=generator).to(DEVICE)[:rows]


def near_tie(case: Case, row: int) -> bool:
    """Whether the two best scores of a row lie within 1e-5 relative."""
    logits = case.logits[row].double()
    drawn = noise.exponentials(case.seeds[row : row + 1], case.positions[row : row + 1], len(logits))[0]
    best = (logits / case.temperature[row].double() - drawn.log()).topk(2).values
    return bool(best[0] - best[1] <= 1e-5 * best[0].abs())


def test_the_words_are_the_noises() -> None:
    seeds, positions = torch.tensor([5, -7, 2**62 + 1]), torch.tensor([0, 2**33 + 1, 9])
    for purpose in (Purpose.SAMPLE, Purpose.DRAFT):
        out = torch.empty(3, 1001, dtype=torch.int64, device=DEVICE)
        kernels.write_words[(3, 2)](seeds.to(DEVICE), positions.to(DEVICE), out, 1001, purpose=int(purpose), TILE=512)
        assert torch.equal(out.cpu(), noise.random_words(seeds, positions, 1001, purpose))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_draws_are_the_references(vocab_size: int) -> None:
    rows = 6 if vocab_size <= 1000 else 2
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(vocab_size, dtype, rows)
        found = LARGE_TILES.draw(case.logits, *case.keys).tolist()
        expected = REFERENCE.draw(case.logits, *case.keys).tolist()
        ties = [row for row in range(rows) if found[row] != expected[row] and near_tie(case, row)]
        assert [r for r in range(rows) if found[r] != expected[r] and r not in ties] == []
        assert len(ties) == 0
        if rows == 6:
            assert (found[2], found[3], found[4]) == (0, NAN_LOGITS, NO_TOKEN_LEFT)


@pytest.mark.parametrize("vocab_size", [1, 2, 1000, 50_257])
def test_statistics_and_decisions_are_the_references(vocab_size: int) -> None:
    case = Case(vocab_size, rows=6 if vocab_size <= 1000 else 2)
    found = LARGE_TILES.statistics(case.logits, case.temperature)
    expected = REFERENCE.statistics(case.logits, case.temperature)
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.log_normalizers, expected.log_normalizers, rtol=1e-6, atol=2e-6, equal_nan=True)
    for laws in ({"draft_probs": case.laws}, {}):
        arguments = (case.logits, expected, case.drafted, *case.keys)
        assert LARGE_TILES.accept(*arguments, **laws).tolist() == REFERENCE.accept(*arguments, **laws).tolist()
        assert LARGE_TILES.recover(*arguments, **laws).tolist() == REFERENCE.recover(*arguments, **laws).tolist()


@pytest.mark.parametrize("vocab_size", [151_936, 262_144])
def test_recovery_in_large_vocabularies(vocab_size: int) -> None:
    case = Case(vocab_size, torch.bfloat16, rows=1)
    statistics = REFERENCE.statistics(case.logits, case.temperature)
    arguments = (case.logits, statistics, case.drafted, *case.keys)
    found = LARGE_TILES.recover(*arguments, draft_probs=case.laws)
    assert found.tolist() == REFERENCE.recover(*arguments, draft_probs=case.laws).tolist()


def test_mixed_entries_by_index() -> None:
    """Entries in any order, rows used twice or not at all; one-hot drafts, drafts with laws, none, nonsense."""
    case = Case(37)
    rows = torch.tensor([5, 0, 1, 0, 4, 3], device=DEVICE)
    laws = {"draft_probs": case.laws, "draft_rows": torch.tensor([2, -1, 0, 5, 1, 3], device=DEVICE), "rows": rows}
    drafted = torch.tensor([3, 36, -1, 9, 37, 0], device=DEVICE)
    statistics = REFERENCE.statistics(case.logits, case.temperature, rows)
    found = SMALL_TILES.statistics(case.logits, case.temperature, rows)
    assert found.tokens.tolist() == statistics.tokens.tolist()
    arguments = (case.logits, statistics, drafted, *case.keys)
    assert SMALL_TILES.accept(*arguments, **laws).tolist() == REFERENCE.accept(*arguments, **laws).tolist()
    arguments = (case.logits, statistics, drafted.clamp(max=36), *case.keys)
    assert SMALL_TILES.recover(*arguments, **laws).tolist() == REFERENCE.recover(*arguments, **laws).tolist()
    drawn = [backend.draw(case.logits, *case.keys, rows=rows).tolist() for backend in (SMALL_TILES, REFERENCE)]
    assert drawn[0] == drawn[1]


def test_decisions_on_every_kind_of_draft_token() -> None:
    """300 entries: laws, one-hot drafts, drafts without mass on their token, nonsense, several temperatures."""
    generator, vocab_size, count = torch.Generator().manual_seed(5), 7, 300
    logits = torch.randn(40, vocab_size, generator=generator)
    logits[7], logits[8, 3] = -torch.inf, torch.nan
    rows = torch.randint(0, 40, (count,), generator=generator)
    laws = torch.rand(50, vocab_size, generator=generator).pow(3)
    laws[:, ::4] = 0.0
    laws /= laws.sum(dim=1, keepdim=True)
    draft_rows = torch.randint(-1, 50, (count,), generator=generator)
    draft_rows[::3] = -1
    token_ids = torch.randint(-2, vocab_size + 2, (count,), generator=generator)
    temperature = torch.tensor([1.0, 0.0, 0.5, 3.0]).repeat(count // 4)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 2**40, (count,), generator=generator)
    here = [t.to(DEVICE) for t in (logits, rows, laws, draft_rows, token_ids, temperature, seeds, positions)]
    logits, rows, laws, draft_rows, token_ids, *keys = here
    statistics = REFERENCE.statistics(logits, keys[0], rows)
    for options in ({"draft_probs": laws, "draft_rows": draft_rows}, {}):
        arguments = (logits, statistics, token_ids, *keys)
        found = SMALL_TILES.accept(*arguments, rows=rows, **options)
        assert found.tolist() == REFERENCE.accept(*arguments, rows=rows, **options).tolist()
        assert 15 < int(found.sum()) < count - 15


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_infinite_logits_are_faults_of_draws_and_largest_otherwise() -> None:
    logits = torch.zeros(4, 40, device=DEVICE)
    logits[0, 35] = logits[1, 35] = logits[1, 38] = logits[2, 20] = torch.inf
    logits[2, 3] = -torch.inf
    logits[3, :38] = -torch.inf  # of all tiles but the last
    logits[3, 39] = 9.0
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0], device=DEVICE)
    keys = torch.arange(4, device=DEVICE)
    found = SMALL_TILES.draw(logits, temperature, keys, keys)
    assert found.tolist() == REFERENCE.draw(logits, temperature, keys, keys).tolist()
    assert found.tolist() == [NAN_LOGITS, 35, NAN_LOGITS, 39]
    statistics, expected = (each.statistics(logits, temperature) for each in (SMALL_TILES, REFERENCE))
    assert statistics.tokens.tolist() == expected.tokens.tolist() == [NAN_LOGITS, 35, NAN_LOGITS, 39]
    torch.testing.assert_close(statistics.log_normalizers, expected.log_normalizers, equal_nan=True)


@pytest.mark.parametrize(("temperature", "base"), [(1.0, 0.0), (1e-4, 30.0)])
def test_what_is_close_is_decided_in_float64(temperature: float, base: float) -> None:
    """Two tokens in different tiles, whose scores differ by less than float32 tells."""
    generator, rows = torch.Generator().manual_seed(11), 8
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.arange(rows)
    noises = noise.exponentials(seeds, positions, 64)
    logits = torch.full((rows, 64), -1e5)
    for row in range(rows):
        first = int(torch.randint(0, 16, (1,), generator=generator))
        second = 16 + int((noises[row, 16:63].log() - noises[row, first].log()).abs().argmin())
        gap = noises[row, second].log() - noises[row, first].log()
        logits[row, first], logits[row, second] = base, base + temperature * gap
    keys = [t.to(DEVICE) for t in (torch.full((rows,), temperature), seeds, positions)]
    logits = logits.to(DEVICE)
    expected = REFERENCE.draw(logits, *keys).tolist()
    assert len({token < 16 for token in expected}) == 2
    assert SMALL_TILES.draw(logits, *keys).tolist() == expected
    # what is left without a token that is never drawn
    arguments = (logits, REFERENCE.statistics(logits, keys[0]), torch.full((rows,), 63, device=DEVICE), *keys)
    assert SMALL_TILES.recover(*arguments, purpose=Purpose.SAMPLE).tolist() == expected


def test_recovery_leaves_out_the_rejected_token_alone() -> None:
    """A rejected token that would be drawn nearly always: of a law, of a one-hot draft beside laws; none rejected."""
    logits = torch.zeros(4, 40, device=DEVICE)
    logits[:, 33] = 12.0
    rejected = torch.tensor([33, 33, -1, 5], device=DEVICE)
    laws = torch.zeros(1, 40, device=DEVICE)
    laws[0, 33] = 1.0
    ones, keys = torch.ones(4, device=DEVICE), torch.arange(4, device=DEVICE)
    statistics = REFERENCE.statistics(logits, ones)
    arguments = (logits, statistics, rejected, ones, keys, keys)
    for options in ({}, {"draft_probs": laws, "draft_rows": torch.tensor([0, -1, 0, -1], device=DEVICE)}):
        found = SMALL_TILES.recover(*arguments, **options).tolist()
        assert found == REFERENCE.recover(*arguments, **options).tolist()
        assert 33 not in found[:2]
        assert found[2:] == [33, 33]


def test_tensors_may_be_views() -> None:
    generator, count = torch.Generator().manual_seed(2), 4
    wide = torch.randn(count, 80, generator=generator).to(DEVICE)
    laws = torch.rand(40, count, generator=generator).softmax(dim=0).to(DEVICE)
    numbers = torch.arange(2 * count, device=DEVICE)
    temperature = torch.tensor([1.0, 9.0] * count, device=DEVICE)[::2]
    views = (wide[:, ::2], temperature, numbers[::2], numbers[1::2])
    copies = tuple(view.contiguous() for view in views)
    index, tokens = torch.tensor([3, 9, 1, 9, 0, 9, 2, 9], device=DEVICE)[::2], numbers[::2] + 20
    statistics = REFERENCE.statistics(copies[0], copies[1], index.contiguous())
    expected = REFERENCE.statistics(copies[0], copies[1])
    found = SMALL_TILES.statistics(*views[:2])
    torch.testing.assert_close(found.log_normalizers, expected.log_normalizers, rtol=1e-6, atol=2e-6)
    assert SMALL_TILES.draw(*views, rows=index).tolist() == REFERENCE.draw(*copies, rows=index).tolist()
    laws_of = {"draft_probs": laws.t(), "draft_rows": index, "rows": index}
    for name in ("accept", "recover"):
        results = [
            getattr(backend, name)(logits, statistics, tokens, *keys, **laws_of).tolist()
            for backend, (logits, *keys) in ((SMALL_TILES, views), (REFERENCE, copies))
        ]
        assert results[0] == results[1]


def test_ties_take_the_lowest_id_whatever_the_tiles() -> None:
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[0, [70, 33, 90]] = 3.0
    logits[1, 15] = -0.0
    keys = torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for backend in (SMALL_TILES, LARGE_TILES):
        assert backend.draw(logits, *keys, keys[1]).tolist() == [33, 0]
        assert backend.statistics(logits, keys[0]).tokens.tolist() == [33, 0]


def test_nothing_left_falls_back_to_the_target() -> None:
    logits = torch.randn(2, 20, device=DEVICE)
    logits[1] = -torch.inf
    logits[1, 7] = 1.0
    ones, keys = torch.ones(2, device=DEVICE), (torch.arange(2, device=DEVICE), torch.arange(2, device=DEVICE))
    statistics = REFERENCE.statistics(logits, ones)
    found = SMALL_TILES.recover(
        logits, statistics, torch.tensor([3, 7], device=DEVICE), ones, *keys, draft_probs=logits.softmax(dim=1) * 1.001
    )
    assert found.tolist() == REFERENCE.draw(logits, ones, *keys, Purpose.RECOVER).tolist()


def test_empty_steps() -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    floats, ints = torch.empty(0, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    statistics = SMALL_TILES.statistics(logits, floats, ints)
    assert isinstance(statistics, RowStatistics)
    assert SMALL_TILES.draw(logits, floats, ints, ints, rows=ints).tolist() == []
    assert SMALL_TILES.accept(logits, statistics, ints, floats, ints, ints, rows=ints).tolist() == []
    assert SMALL_TILES.recover(logits, statistics, ints, floats, ints, ints, rows=ints).tolist() == []
