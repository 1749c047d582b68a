"""Requests and statistics for the sampling tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, field

from specdec.sampling.params import SamplingParams


@define(eq=False)
class FakeRequest:
    """What sampling reads of a request; tests change ``token_ids`` as an engine would."""

    request_id: str
    params: SamplingParams
    token_ids: np.ndarray
    num_prompt_tokens: int
    seed: int = 0
    stop_token_ids: frozenset[int] = field(factory=frozenset)
    grammar: Any = None


MakeRequest = Callable[..., FakeRequest]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """make_request(prompt, output, seed=, stops=, vocab_size=, name=, **sampling parameters)."""

    def make(
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        seed: int = 0,
        stops: Sequence[int] = (),
        name: str = "r",
        vocab_size: int | None = None,
        **options: Any,
    ) -> FakeRequest:
        params = SamplingParams(**options)
        if vocab_size is not None:
            params = params.check_against(vocab_size=vocab_size, max_model_len=4096)
        tokens = np.array([*prompt, *output], dtype=np.int64)
        return FakeRequest(name, params, tokens, len(prompt), seed, frozenset(stops))

    return make


@pytest.fixture(scope="session")
def chi_square_fits() -> Callable[[np.ndarray, np.ndarray], bool]:
    """chi_square_fits(counts, probabilities): Pearson's test at a significance of 1e-6 (Wilson and Hilferty 1931)."""

    def fits(counts: np.ndarray, probabilities: np.ndarray) -> bool:
        expected = probabilities * counts.sum()
        assert (expected >= 5).all()
        df = len(counts) - 1
        limit = df * (1 - 2 / (9 * df) + 4.753 * np.sqrt(2 / (9 * df))) ** 3
        return bool(((counts - expected) ** 2 / expected).sum() < limit)

    return fits
