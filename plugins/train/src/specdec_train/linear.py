"""Least squares, from rows that come in parts: what some heads start from."""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-4
"""Share of the inputs' mean square that is added to each of them."""


class LeastSquares:
    """The linear map from inputs to outputs with the smallest squared errors, with a little damping."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        """Begin without rows."""
        self._squares = torch.zeros(num_inputs, num_inputs)
        self._products = torch.zeros(num_inputs, num_outputs)
        self._num_rows = 0

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take in rows: [N, num_inputs] and [N, num_outputs]."""
        self._squares += inputs.T @ inputs
        self._products += inputs.T @ outputs
        self._num_rows += len(inputs)

    def solve(self) -> Tensor:
        """The map, [num_outputs, num_inputs]."""
        squares = self._squares.double()
        squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
        return torch.linalg.solve(squares, self._products.double()).T.float()

    def reduced(self, rank: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The map cut to a rank, so that outputs keep what matters ("reduced-rank regression", Izenman 1975).

        Args:
            rank: at most num_outputs.
            weight: [num_outputs, num_outputs], symmetric and positive: errors e count as ``e @ weight @ e``.

        Returns:
            [num_outputs, rank] and [rank, num_outputs]: an output is the first times the second times `solve` times the
            input. The second alone says what an output is in the directions that are kept; over the rows so far this
            has a mean square of 1.
        """
        full = self.solve().double()
        values, vectors = torch.linalg.eigh(weight.double())
        root = values.clamp(min=values.max() * 1e-9).sqrt()
        there, back = vectors * root @ vectors.T, vectors / root @ vectors.T
        predicted = there @ full @ self._squares.double() @ full.T @ there
        variances, directions = torch.linalg.eigh(predicted / max(1, self._num_rows))
        size, kept = variances[-rank:].mean().sqrt(), directions[:, -rank:]
        return (back @ kept * size).float(), (kept.T @ there / size).float()
