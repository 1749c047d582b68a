"""`block` keeps the contract of verifiers."""

from __future__ import annotations

import pytest
import torch

from specdec.testing.contracts.verifier import VerifierContract
from specdec_verify_block.block import BlockVerifier


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestBlock(VerifierContract):
    plugin = "specdec_verify_block.plugin"
    distribution = "specdec-verify-block"

    @pytest.fixture
    def verifier(self) -> BlockVerifier:
        return BlockVerifier()
