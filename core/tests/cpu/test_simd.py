"""The vector primitives of kernels, called through a small compiled function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.cpu.layout import BFLOAT16, FLOAT32, LANES
from specdec.cpu.library import Kernels


def test_exp_is_accurate_over_its_range(examples: Kernels) -> None:
    """Within 2e-7 relative of float64; 0 far below, also for -inf."""
    x = np.linspace(-86.9, 88.0, 20001, dtype=np.float32)
    out = np.empty_like(x)
    examples.function("exp_all")(x.ctypes.data, out.ctypes.data, len(x))
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=2e-7)
    low = np.array([-1e4, -np.inf, -90.0], dtype=np.float32)
    out = np.full(3, 7.0, dtype=np.float32)
    examples.function("exp_all")(low.ctypes.data, out.ctypes.data, 3)
    assert out.tolist() == [0.0, 0.0, 0.0]


def test_tanh_is_accurate_and_bounded(examples: Kernels) -> None:
    """Within 3e-7 absolute of float64, for large arguments too."""
    x = np.concatenate([np.linspace(-12, 12, 5001), [-1e6, 1e6]]).astype(np.float32)
    out = np.empty_like(x)
    examples.function("tanh_all")(x.ctypes.data, out.ctypes.data, len(x))
    np.testing.assert_allclose(out, np.tanh(x.astype(np.float64)), atol=3e-7)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_loads_and_stores_touch_only_their_elements(examples: Kernels, count: int) -> None:
    """Elements past the end stay as they were; bfloat16 rounds to nearest even like torch."""
    values = torch.randn(64)
    for from_dtype, from_kind in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        for to_dtype, to_kind in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
            source, out = values.to(from_dtype), torch.full((64,), 9.0, dtype=to_dtype)
            examples.function("copy")(from_kind, source.data_ptr(), to_kind, out.data_ptr(), count)
            assert torch.equal(out[:count], source[:count].to(to_dtype))
            assert bool((out[count:] == 9.0).all())


def test_lanes_past_the_end_are_zero(examples: Kernels) -> None:
    """A sum over a part of a vector does not see what lies behind it."""
    x = np.ones(LANES, dtype=np.float32)
    assert [examples.function("sum_some")(x.ctypes.data, n) for n in (1, 5, 16)] == [1.0, 5.0, 16.0]
