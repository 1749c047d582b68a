"""min-p, top-k and top-p against a definition written in plain Python, for both implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.ranking import _first_by_topk, first_ranked, first_tokens
from specdec.sampling.rows import StepRows
from specdec.sampling.truncation import Truncation, truncate_rows
from specdec.types import Draft

Option = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p."""


def definition(row: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that stay, by the words of the documentation."""
    temperature = float(np.float32(temperature))
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    best = row[order[0]]
    distance = {t: (row[t] - best) / temperature if row[t] > -math.inf else -math.inf for t in order}
    kept = [t for t in order if min_p == 0 or distance[t] >= math.log(min_p)]
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        masses = [math.exp(distance[t]) for t in kept]
        before, stay = 0.0, []
        for token, mass in zip(kept, masses, strict=True):
            if stay and before >= (top_p - 1e-6) * sum(masses):
                break
            stay.append(token)
            before += mass
        kept = stay
    return sorted(t for t in kept if row[t] > -math.inf)


def a_step(make_request: Any, options: Sequence[Option], drafts: Sequence[int] | None = None) -> StepRows:
    requests = [
        make_request([0], name=str(i), temperature=t, top_k=k, top_p=p, min_p=m)
        for i, (t, k, p, m) in enumerate(options)
    ]
    counts = np.array(drafts or [0] * len(requests))
    draft = Draft(
        token_ids=torch.zeros(int(counts.sum()), dtype=torch.int64), num_draft_tokens=torch.from_numpy(counts).int()
    )
    return StepRows(RowLayout.build(counts, np.ones(len(requests))), draft, SamplingBatch.build(requests))


def on_cpu(logits: torch.Tensor, step: StepRows) -> torch.Tensor:
    changed = logits.clone()
    Truncation().apply(changed, step)
    return changed


def anywhere(logits: torch.Tensor, step: StepRows) -> torch.Tensor:
    changed = logits.clone()
    truncate_rows(changed, step, step.rows_of_all(step.batch.truncated))
    return changed


BOTH = [on_cpu, anywhere]
Path = Callable[[torch.Tensor, StepRows], torch.Tensor]


def check(found: torch.Tensor, logits: torch.Tensor, options: Sequence[Option]) -> None:
    for row, original, option in zip(found, logits, options, strict=True):
        stays = definition(original.double().tolist(), *option)
        assert torch.isfinite(row).nonzero()[:, 0].tolist() == stays, option
        assert torch.equal(row[stays], original[stays])


OPTIONS: list[Option] = [
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.5, 40, 0.8, 0.0),
    (2.0, 40, 0.8, 0.1),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 10**9, 0.99, 0.0),
    (1.0, 0, 0.9999999, 0.001),
    (100.0, 0, 0.5, 0.0),
    (2e-5, 0, 0.5, 0.0),
]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1000, 5003])
def test_equals_the_definition(make_request: Any, path: Path, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(OPTIONS), vocab_size, generator=generator) * 3
    # bfloat16 has many equal logits, so ties at every cutoff.
    logits = logits.to(dtype).float()
    check(path(logits, a_step(make_request, OPTIONS)), logits, OPTIONS)


@pytest.mark.parametrize("path", BOTH)
def test_only_top_k(make_request: Any, path: Path) -> None:
    """Without a top-p row there is no need to rank all tokens; ties still go by token id."""
    options: list[Option] = [(1.0, k, p, 0.0) for k in (1, 2, 3, 7) for p in (1.0, 0.6)]
    for logits in (
        torch.zeros(len(options), 50),
        torch.arange(50).flip(0).float().div(3).floor().expand(len(options), -1),
        torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0, -torch.inf, 3.0, -0.0, 0.0]).expand(len(options), -1),
    ):
        check(path(logits.contiguous(), a_step(make_request, options)), logits, options)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(
        st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -math.inf, 30.0, -200.0]), st.floats(-20, 20, width=16)),
        min_size=1,
        max_size=90,
    ),
    option=st.tuples(
        st.sampled_from([0.01, 0.5, 1.0, 3.0]),
        st.integers(0, 20),
        st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.25, 0.1, 1e-7]),
        st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    ),
)
def test_equals_the_definition_everywhere(make_request: Any, logits: list[float], option: Option) -> None:
    rows = torch.tensor([logits])
    if not rows.isfinite().any():
        return
    step = a_step(make_request, [option])
    for path in BOTH:
        check(path(rows, step), rows, [option])


@pytest.mark.parametrize("path", BOTH)
def test_sums_that_should_be_equal_are(make_request: Any, path: Path) -> None:
    """Four equal tokens: exactly two of them are half of the mass, whatever the rounding."""
    for count in (4, 10, 1000):
        logits = torch.full((1, count), 0.1)
        found = path(logits, a_step(make_request, [(1.0, 0, 0.5, 0.0)]))
        assert torch.isfinite(found).sum() == count // 2
        assert torch.isfinite(found[0, : count // 2]).all()


@pytest.mark.parametrize("path", BOTH)
def test_rows_that_are_left_alone(make_request: Any, path: Path) -> None:
    """Greedy rows, rows without options, and rows the sampler will refuse."""
    options: list[Option] = [(0.0, 2, 0.5, 0.3), (1.0, 0, 1.0, 0.0), *[(1.0, 2, 0.5, 0.3)] * 2, (1.0, 0, 0.5, 0.0)]
    logits = torch.randn(5, 20)
    logits[2, 5] = torch.nan
    logits[3] = -torch.inf
    logits[4, 2] = torch.inf
    found = path(logits, a_step(make_request, options))
    assert torch.equal(torch.nan_to_num(found, nan=7.0), torch.nan_to_num(logits, nan=7.0))


def test_every_row_of_a_request_is_truncated(make_request: Any) -> None:
    step = a_step(make_request, [(1.0, 3, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 4, 1.0, 0.0)], drafts=[2, 1, 0])
    for path in BOTH:
        found = path(torch.randn(6, 40), step)
        assert torch.isfinite(found).sum(dim=1).tolist() == [3, 3, 3, 40, 40, 4]


def test_large_rows_agree(make_request: Any) -> None:
    """Both implementations on rows like a language model's: a few likely tokens and a broad rest."""
    options: list[Option] = [(0.8, 0, 0.95, 0.0), (1.0, 50, 1.0, 0.0), (1.5, 0, 0.999, 0.0), (1.0, 1000, 0.9, 0.0)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50_257, generator=generator) * 2.5
    logits[:, :30] += 9
    for rows in (logits, logits.bfloat16().float()):
        step = a_step(make_request, options)
        assert torch.equal(on_cpu(rows, step), anywhere(rows, step))


@pytest.mark.parametrize("count", [0, 1, 5, 63, 64, 200, 1500])
def test_ranking(count: int) -> None:
    logits = torch.randn(3, 1500).bfloat16().float()
    values, tokens = first_ranked(logits, count)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(tokens, expected.indices[:, :count])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = logits.to(dtype)
        assert torch.equal(
            first_tokens(own, count), own.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
        )
    if 0 < count < 1500:
        assert torch.equal(_first_by_topk(logits, count)[1], tokens)


def test_the_tests_can_fail(make_request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p before top-k, or a mass that includes the token itself, is noticed."""
    logits = torch.randn(len(OPTIONS), 300, generator=torch.Generator().manual_seed(5)) * 2
    swapped = [(t, 0, p, m) for t, k, p, m in OPTIONS]
    found = on_cpu(logits, a_step(make_request, swapped))
    with pytest.raises(AssertionError):
        check(found, logits, OPTIONS)
