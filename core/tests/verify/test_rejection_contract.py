"""`rejection` keeps the contract of verifiers, with either rule for trees."""

from __future__ import annotations

import pytest
import torch

from specdec.testing.contracts.verifier import VerifierContract
from specdec.verify.base import Verifier
from specdec.verify.config import RejectionConfig
from specdec.verify.rejection import RejectionVerifier


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestRejection(VerifierContract):
    plugin = "specdec.verify.rejection_plugin"

    @pytest.fixture
    def verifier(self) -> Verifier:
        return RejectionVerifier()


class TestRecursive(VerifierContract):
    @pytest.fixture
    def verifier(self) -> Verifier:
        return RejectionVerifier(RejectionConfig(tree_rule="recursive"))
