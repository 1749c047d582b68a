"""Contract tests: subclass one, give its fixture, and pytest checks that a plugin keeps what its interface promises.

A proposer's ``tests/test_contract.py`` is all of this::

    class TestMine(ProposerContract):
        plugin = "specdec_mine.plugin"
        distribution = "specdec-mine"

        @pytest.fixture
        def proposer(self):
            return MyProposer(num_speculative_tokens=self.num_speculative_tokens)
"""

import pytest

for _name in ("base", "proposer", "verifier", "attention"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from specdec.testing.contracts.attention import AttentionBackendContract  # noqa: E402
from specdec.testing.contracts.base import PluginContract  # noqa: E402
from specdec.testing.contracts.proposer import ProposerContract, check_draft  # noqa: E402
from specdec.testing.contracts.verifier import VerifierContract  # noqa: E402

__all__ = ["AttentionBackendContract", "PluginContract", "ProposerContract", "VerifierContract", "check_draft"]
