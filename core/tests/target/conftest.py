from __future__ import annotations

import pytest
import torch

from specdec.target.cache import cache_root


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, in which only the compiled kernels are shared with other runs."""
    own, kernels = tmp_path / "cache", cache_root() / "kernels"
    own.mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("SPECDEC_CACHE", str(own))
    return own
