"""The SDPA backend holds to the contract of attention backends."""

from __future__ import annotations

import pytest
import torch

from specdec.attention.sdpa import SdpaBackend
from specdec.testing.contracts import AttentionBackendContract


class TestSdpa(AttentionBackendContract):
    plugin = "specdec.attention.plugin"

    @pytest.fixture
    def backend(self):
        return SdpaBackend()


class TestSdpaInBfloat16(TestSdpa):
    dtype = torch.bfloat16
    tolerance = 3e-2
