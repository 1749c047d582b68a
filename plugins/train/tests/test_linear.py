"""Least squares against what the data were made of."""

import pytest
import torch

from specdec_train.linear import LeastSquares


def made_by(true_map: torch.Tensor, noise: float = 0.0) -> LeastSquares:
    """A fit of 2 x 400 rows that follow from a map [out, in]."""
    fit = LeastSquares(true_map.shape[1], true_map.shape[0])
    for _ in range(2):
        inputs = torch.randn(400, true_map.shape[1])
        outputs = inputs @ true_map.T
        fit.add(inputs, outputs + noise * torch.randn_like(outputs))
    return fit


def test_the_map_is_found() -> None:
    torch.manual_seed(0)
    true_map = torch.randn(5, 7)
    torch.testing.assert_close(made_by(true_map).solve(), true_map, atol=1e-3, rtol=0)


def test_a_lower_rank_keeps_what_the_weights_call_important() -> None:
    """Two outputs of three are kept: those with the larger weights, not those that vary most."""
    torch.manual_seed(0)
    true_map = torch.diag(torch.tensor([1.0, 3.0, 2.0]))
    fit = made_by(true_map, noise=0.01)
    restore, keep = fit.reduced(2, torch.diag(torch.tensor([100.0, 0.01, 100.0])))
    assert restore.shape == (3, 2)
    assert keep.shape == (2, 3)
    cut = restore @ keep @ fit.solve()
    torch.testing.assert_close(cut[[0, 2]], true_map[[0, 2]], atol=0.02, rtol=0)
    coordinates = torch.randn(10_000, 3) @ true_map.T @ keep.T
    assert float(coordinates.square().mean()) == pytest.approx(1.0, rel=0.2)
