"""The proposer keeps the contract of its interface."""

import pytest

from specdec.drafting import Proposer
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec_suffix.config import SuffixConfig
from specdec_suffix.plugin import propose


class SuffixContract(ProposerContract):
    plugin = "specdec_suffix.plugin"
    distribution = "specdec-suffix"
    config = SuffixConfig()

    @pytest.fixture
    def proposer(self) -> Proposer:
        proposer = propose(self.config, engine_context(num_speculative_tokens=self.num_speculative_tokens))
        proposer.load(None)
        return proposer


class TestDefaults(SuffixContract):
    pass


class TestTrees(SuffixContract):
    config = SuffixConfig(suffix_trees=True, suffix_decoding_max_spec_factor=3.0, suffix_decoding_min_token_prob=0.0)


class TestSmallStore(SuffixContract):
    config = SuffixConfig(suffix_max_cached_tokens=100, suffix_decoding_max_tree_depth=3)
    num_speculative_tokens = 1


class TestNoStore(SuffixContract):
    config = SuffixConfig(suffix_decoding_max_cached_requests=0)
