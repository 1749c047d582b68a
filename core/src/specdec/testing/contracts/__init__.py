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

_MODULES = (
    "attention",
    "base",
    "grammar",
    "head",
    "logits_processor",
    "proposer",
    "sampling_backend",
    "stat_logger",
    "target",
    "trained",
    "verifier",
)
for _name in _MODULES:
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from specdec.testing.contracts.attention import AttentionBackendContract  # noqa: E402
from specdec.testing.contracts.base import PluginContract  # noqa: E402
from specdec.testing.contracts.grammar import GrammarBackendContract  # noqa: E402
from specdec.testing.contracts.head import DraftHeadContract  # noqa: E402
from specdec.testing.contracts.logits_processor import LogitsProcessorContract  # noqa: E402
from specdec.testing.contracts.proposer import ProposerContract, check_draft  # noqa: E402
from specdec.testing.contracts.sampling_backend import SamplingBackendContract  # noqa: E402
from specdec.testing.contracts.stat_logger import StatLoggerContract  # noqa: E402
from specdec.testing.contracts.trained import TrainedProposerContract  # noqa: E402
from specdec.testing.contracts.verifier import VerifierContract  # noqa: E402

__all__ = [
    "AttentionBackendContract",
    "DraftHeadContract",
    "GrammarBackendContract",
    "LogitsProcessorContract",
    "PluginContract",
    "ProposerContract",
    "SamplingBackendContract",
    "StatLoggerContract",
    "TrainedProposerContract",
    "VerifierContract",
    "check_draft",
]
