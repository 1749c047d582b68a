"""When two ways of computing the same thing count as equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error (of norms) that rounding in another order may cause."""


def noise(*shape: int, like: Tensor) -> Tensor:
    """Fixed random numbers of the dtype and device of ``like``; torch's global random state is left alone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like)


def close(result: object, expected: object) -> bool:
    """Whether two tensors agree in shape and dtype, and in value up to rounding."""
    if not isinstance(result, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    return relative_error(result, expected) <= TOLERANCE[expected.dtype]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected; infinite when shapes or dtypes differ."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float("inf")
    difference = (result.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp(min=1e-30))
