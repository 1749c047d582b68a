"""The core's own verifier and attention backend keep the contracts."""

import pytest
import torch

from specdec.attention.interface import AttentionBackend
from specdec.testing.contracts import AttentionBackendContract, VerifierContract
from specdec.verify.base import Verifier

torch.set_num_threads(1)


class TestMatch(VerifierContract):
    plugin = "specdec.verify.plugin"
    distribution = "specdec-core"

    @pytest.fixture
    def verifier(self) -> Verifier:
        from specdec.verify.match import MatchVerifier

        return MatchVerifier()


class SdpaContract(AttentionBackendContract):
    plugin = "specdec.attention.plugin"
    distribution = "specdec-core"

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        from specdec.attention.sdpa import SdpaBackend

        return SdpaBackend()


class TestSdpa(SdpaContract):
    pass


class TestSdpaInBfloat16(SdpaContract):
    dtype = torch.bfloat16
    tolerance = 3e-2
