from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as hf

from specdec.target.masks import MaskPattern, pattern_of_tensor, probe_pattern

NO_PADDING = torch.zeros(1, dtype=torch.int64)


def probe(function, max_position=100):
    """Probe a mask function in transformers' form."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return probe_pattern(lambda q, k: torch.as_tensor(function(zero, zero, q, k)), max_position)


def test_causal():
    assert probe(hf.causal_mask_function) == MaskPattern()


@pytest.mark.parametrize("size", [1, 2, 7, 100, 350])
def test_sliding_window(size):
    assert probe(hf.sliding_window_causal_mask_function(size)) == MaskPattern(sliding_window=size)


def test_a_window_that_is_never_reached_is_none():
    assert probe(hf.sliding_window_causal_mask_function(5000)) == MaskPattern()


@pytest.mark.parametrize("size", [2, 7, 64, 100])
def test_chunks(size):
    assert probe(hf.chunked_causal_mask_function(size, NO_PADDING)) == MaskPattern(chunk_size=size)


@pytest.mark.parametrize(
    "function",
    [
        hf.bidirectional_mask_function,
        hf.sliding_window_bidirectional_mask_function(5),
        hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4)),
        hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0),
        hf.and_masks(hf.sliding_window_causal_mask_function(5), lambda b, h, q, k: (k != 3) | (q < 4)),
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (q < 0) & (k < 0),
    ],
    ids=["bidirectional", "bidirectional window", "prefix", "stride", "hole", "strictly before", "nothing"],
)
def test_other_patterns_are_problems(function):
    assert probe(function).problem


def test_ready_made_masks():
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    additive = torch.zeros(1, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min)
    assert pattern_of_tensor(causal[None, None]) == MaskPattern()
    assert pattern_of_tensor(additive) == MaskPattern()
    distances = torch.arange(6)[None, :] - torch.arange(6)[:, None]
    for other in (
        additive + 0.1 * distances,
        causal[None, None] & (distances != -2),
        causal.T[None, None],
        additive[..., :5],
    ):
        assert pattern_of_tensor(other).problem
