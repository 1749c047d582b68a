"""Random cases over every proposer, alone and composed: the text is plain decoding's whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.run import Fuzz

SEEDS_PER_TEST, NUM_TESTS = 10, 12


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    torch.set_num_threads(1)
    found = Fuzz(Checkpoints(tmp_path_factory.mktemp("checkpoints")))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SEEDS_PER_TEST * NUM_TESTS, SEEDS_PER_TEST))
def test_random_cases(fuzz: Fuzz, first: int) -> None:
    """Each prints its number when it fails; `python -m tests.fuzz N N+1` runs it alone."""
    results = [fuzz.run(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    wrong = [f"{result.description}\n{problem}" for result in results for problem in result.problems]
    assert not wrong, "\n".join(wrong)
    refused = [f"{result.description}: {result.refused}" for result in results if result.refused]
    assert not refused, "\n".join(refused)
    assert sum(result.counts[0] for result in results) > 100, "hardly anything was drafted"
