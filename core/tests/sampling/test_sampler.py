"""The compiled sampler finds exactly the reference's tokens; faults get their codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling import noise
from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT, failure_message
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sample
from specdec.sampling.torch_backend import TorchSampling

VOCABULARIES = [1, 2, 3, 5, 1000, 1023, 1024, 1025, 32_000, 50_257, 151_936]


def step(make_request: Any, temperatures: list[float], positions: list[int] | None = None, seed: int = 0) -> Any:
    requests = [
        make_request(
            [0] * (positions[i] if positions else 3 + i), seed=seed * 1000 + i * 77, temperature=t, name=str(i)
        )
        for i, t in enumerate(temperatures)
    ]
    layout = RowLayout.build(np.zeros(len(requests), dtype=np.int64), np.array([len(r.token_ids) for r in requests]))
    return layout, SamplingBatch.build(requests)


def reference(logits: torch.Tensor, layout: Any, batch: Any) -> torch.Tensor:
    tokens = logits.argmax(dim=-1)
    temperature = batch.temperature[layout.request_index]
    drawn, _ = noise.race(logits, temperature.clamp(min=1e-5), batch.seeds[layout.request_index], layout.positions)
    return torch.where(temperature > 0, drawn, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_tokens_equal_the_references(make_request: Any, vocab_size: int, dtype: torch.dtype) -> None:
    layout, batch = step(make_request, [0.0, 0.05, 0.7, 1.0, 1.0, 5.0, 0.0, 1.3])
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(8, vocab_size, generator=generator) * 4).to(dtype)
    logits[4, 1:] = -torch.inf
    logits[5, ::2] = -torch.inf
    logits[5, 0] = 1.0
    logits[6] = 2.5  # all equal
    before = logits.clone()
    tokens = sample(logits, layout, batch)
    assert tokens.tolist() == reference(logits, layout, batch).tolist()
    assert tokens[4] == 0
    assert tokens[6] == 0
    assert torch.equal(logits, before)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    vocab_size=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 20.0, 1e4]),
    temperature=st.sampled_from([1.1e-5, 0.01, 0.6, 1.0, 3.0, 100.0]),
)
def test_tokens_equal_the_references_everywhere(
    make_request: Any, data: st.DataObject, vocab_size: int, scale: float, temperature: float
) -> None:
    seed = data.draw(st.integers(0, 2**31))
    layout, batch = step(make_request, [temperature] * 3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * scale + data.draw(st.sampled_from([0.0, -50.0, 1e3]))
    mask = torch.rand(3, vocab_size, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))
    logits = logits.masked_fill(mask, -torch.inf)
    logits[:, vocab_size // 2] = 0.0
    assert sample(logits, layout, batch).tolist() == reference(logits, layout, batch).tolist()


def test_ties_take_the_lowest_id(make_request: Any) -> None:
    layout, batch = step(make_request, [0.0] * 4)
    logits = torch.zeros(4, 3000)
    logits[0, [1700, 900, 2500]] = 3.0
    logits[1, [2999, 1024]] = 3.0
    logits[2] = -torch.inf
    logits[2, [8, 9]] = -2.0
    logits[3, :] = -1.0
    logits[3, 700:] = 0.0
    logits[3, 650] = -0.0  # equal to 0.0
    assert sample(logits, layout, batch).tolist() == [900, 1024, 8, 650]
    assert sample(logits.bfloat16(), layout, batch).tolist() == [900, 1024, 8, 650]


def test_a_tie_in_the_race_takes_the_lowest_id(make_request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "random_words", lambda *arguments: torch.full((1, 6), 12345))
    tokens, _ = noise.race(torch.zeros(1, 6), torch.ones(1), torch.zeros(1).long(), torch.zeros(1).long())
    assert tokens.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 3000])
def test_rows_without_a_token_get_codes_and_others_do_not_notice(
    make_request: Any, vocab_size: int, dtype: torch.dtype
) -> None:
    layout, batch = step(make_request, [0.0, 1.0] * 5)
    logits = torch.randn(10, vocab_size).to(dtype)
    expected = sample(logits, layout, batch)
    logits[2, vocab_size // 2] = torch.nan
    logits[3, vocab_size - 1] = torch.nan
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[7, 0] = torch.inf
    logits[8, 0] = -torch.nan
    expected[[2, 3, 7, 8]] = NAN_LOGITS
    expected[[4, 5]] = NO_TOKEN_LEFT
    assert sample(logits, layout, batch).tolist() == expected.tolist()


def test_the_path_of_other_devices(make_request: Any) -> None:
    """The same tokens and codes from plain torch, for devices without a backend of their own."""
    layout, batch = step(make_request, [0.0, 1.0] * 5)
    logits = torch.randn(10, 500)
    logits[2, 3] = logits[3, 4] = torch.nan
    logits[4] = logits[5] = -torch.inf
    logits[7, 9] = torch.inf
    expected = sample(logits, layout, batch)
    greedy_layout, greedy = step(make_request, [0.0] * 10)
    expected_greedy = sample(logits, greedy_layout, greedy)
    keys = batch.seeds, layout.positions
    assert TorchSampling().draw(logits, batch.temperature, *keys).tolist() == expected.tolist()
    assert TorchSampling().draw(logits, greedy.temperature, *keys).tolist() == expected_greedy.tolist()


def test_the_law_of_the_sampler(make_request: Any, chi_square_fits: Callable[[np.ndarray, np.ndarray], bool]) -> None:
    """One request at many positions draws from the softmax; rows with another seed draw something else."""
    request = make_request([0], seed=9, temperature=0.8)
    other = make_request([0], seed=10, temperature=0.8, name="other")
    count = 200_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.3, -0.4, 0.9, 1.8]).expand(count, -1).contiguous()
    law = torch.softmax(logits[0].double() / 0.8, 0).numpy()
    drawn = []
    for r in (request, other):
        layout = RowLayout(
            row_start=torch.tensor([0, count], dtype=torch.int32),
            request_index=torch.zeros(count, dtype=torch.int64),
            positions=torch.arange(count),
            num_requests=1,
        )
        drawn.append(sample(logits, layout, SamplingBatch.build([r])).numpy())
        assert chi_square_fits(np.bincount(drawn[-1], minlength=8), law)
    together = np.bincount(drawn[0] * 8 + drawn[1], minlength=64)
    assert chi_square_fits(together, np.outer(law, law).ravel())
    # The test can fail: a law that is 5 % off is noticed.
    off = law * np.where(np.arange(8) == 3, 1.05, 1.0)
    assert not chi_square_fits(np.bincount(drawn[0], minlength=8), off / off.sum())


def test_unlikely_tokens_keep_their_odds(make_request: Any) -> None:
    """Below 2**-24, where float32 noise would distort: 3e7 draws of a token of probability 1e-6 would be slow, so the
    smallest noise is forced instead."""
    words = noise.random_words(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), 1000)
    row, token = divmod(int(words.argmin()), 1000)
    smallest = (int(words.min()) + 0.5) * 2.0**-32
    for margin, wins in ((0.999, True), (1.001, False)):
        logits = torch.full((1, 1000), -torch.inf, dtype=torch.float32)
        rival = 0 if token else 1
        logits[0, token] = 0.0
        noise_of_rival = float(noise.exponentials(torch.tensor([row]), torch.tensor([0]), 1000)[0, rival])
        logits[0, rival] = float(np.log(noise_of_rival) - np.log(smallest) + np.log(margin))
        request = make_request([], seed=row, temperature=1.0)
        layout = RowLayout.build(np.array([0]), np.array([0]))
        assert (sample(logits, layout, SamplingBatch.build([request])).item() == token) is wins


def test_the_message_says_which_options_leave_no_token() -> None:
    assert "not numbers" in failure_message(NAN_LOGITS, SamplingParams())
    message = failure_message(NO_TOKEN_LEFT, SamplingParams(allowed_token_ids=[3], min_tokens=2))
    assert message == "No token can be chosen: allowed_token_ids and min_tokens together leave none of the vocabulary."
    assert "bad_words leaves none" in failure_message(NO_TOKEN_LEFT, SamplingParams(bad_words_token_ids=[[1]]))
    assert "-inf" in failure_message(NO_TOKEN_LEFT, SamplingParams())


def test_the_message_names_the_processors_that_apply_not_those_that_could() -> None:
    """Arguments for a proposer are no sign of a processor, and a processor may apply without any."""
    with_arguments = SamplingParams(bad_words_token_ids=[[1]], extra_args={"for the proposer": 1})
    assert "bad_words leaves none" in failure_message(NO_TOKEN_LEFT, with_arguments)
    message = failure_message(NO_TOKEN_LEFT, SamplingParams(), ["logits processor 'strict' of toy 2.1"])
    assert message == "No token can be chosen: the logits processor 'strict' of toy 2.1 leaves none of the vocabulary."


def test_seeds_of_64_bits(make_request: Any) -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 2**32]
    requests = [make_request([0], seed=seed, temperature=1.0, name=str(seed)) for seed in seeds]
    layout = RowLayout.build(np.zeros(5, dtype=np.int64), np.full(5, 1))
    logits = torch.zeros(5, 50_000)
    tokens = sample(logits, layout, SamplingBatch.build(requests)).tolist()
    assert len(set(tokens)) == 5
