"""The CPU backend holds to the contract of attention backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from specdec.testing.contracts import AttentionBackendContract
from specdec_attention_cpu.backend import CpuBackend


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestFloat32(AttentionBackendContract):
    plugin = "specdec_attention_cpu.plugin"
    distribution = "specdec-attention-cpu"

    @pytest.fixture
    def backend(self) -> CpuBackend:
        return CpuBackend()


class TestBfloat16(TestFloat32):
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    tolerance: ClassVar[float] = 1e-2


class TestBlocksOf16(TestFloat32):
    block_size: ClassVar[int] = 16


class TestOddBlocks(TestFloat32):
    block_size: ClassVar[int] = 5
