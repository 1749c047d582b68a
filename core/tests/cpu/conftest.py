from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec.cpu.library import Kernels

sys.path.append(str(Path(__file__).parent / "kernels"))  # also for the processes that compile

EXAMPLES = Kernels("example_kernels")


@pytest.fixture(scope="session")
def examples() -> Kernels:
    """The compiled functions of ``kernels/example_kernels.py``."""
    return EXAMPLES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
