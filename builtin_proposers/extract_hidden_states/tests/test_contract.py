"""The proposer keeps the contract of its interface."""

from pathlib import Path

import pytest

from specdec.drafting import Proposer
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec_extract_hidden_states.config import ExtractConfig
from specdec_extract_hidden_states.plugin import propose


class TestExtract(ProposerContract):
    plugin = "specdec_extract_hidden_states.plugin"
    distribution = "specdec-extract-hidden-states"
    shortest_text = 2

    @pytest.fixture
    def proposer(self, tmp_path: Path) -> Proposer:
        config = ExtractConfig(output_path=str(tmp_path), layers=(0, 1))
        proposer = propose(config, engine_context(num_speculative_tokens=self.num_speculative_tokens))
        proposer.load(None)
        return proposer
