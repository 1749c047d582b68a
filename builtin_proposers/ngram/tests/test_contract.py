"""The proposer keeps the contract of its interface."""

import pytest

from specdec.drafting import Proposer
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec_ngram.config import NgramConfig
from specdec_ngram.plugin import propose


class NgramContract(ProposerContract):
    plugin = "specdec_ngram.plugin"
    distribution = "specdec-ngram"
    config = NgramConfig()

    @pytest.fixture
    def proposer(self) -> Proposer:
        proposer = propose(self.config, engine_context(num_speculative_tokens=self.num_speculative_tokens))
        proposer.load(None)
        return proposer


class TestDefaults(NgramContract):
    pass


class TestShortMatches(NgramContract):
    config = NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3)


class TestWideWindow(NgramContract):
    config = NgramConfig(prompt_lookup_min=2, prompt_lookup_max=500)
    num_speculative_tokens = 1
