"""The proposer keeps the contract of its interface."""

from typing import Any

import pytest

from specdec.drafting import Proposer
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec_token_recycling.config import TokenRecyclingConfig
from specdec_token_recycling.plugin import propose


class RecyclingContract(ProposerContract):
    plugin = "specdec_token_recycling.plugin"
    distribution = "specdec-token-recycling"
    shortest_text = 2
    tree: Any = None

    @pytest.fixture
    def proposer(self) -> Proposer:
        config = TokenRecyclingConfig(speculative_token_tree=self.tree)
        proposer = propose(config, engine_context(num_speculative_tokens=self.num_speculative_tokens))
        proposer.load(None)
        return proposer


class TestChains(RecyclingContract):
    pass


class TestTrees(RecyclingContract):
    tree = "[(0,), (1,), (2,), (0, 0)]"


class TestSmallTree(RecyclingContract):
    tree = "[(0,), (0, 0), (0, 1)]"
