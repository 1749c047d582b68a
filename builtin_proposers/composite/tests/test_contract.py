"""The proposer keeps the contract of its interface, with members that look up n-grams."""

import pytest

from specdec.drafting import Proposer
from specdec.registry import Registry
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec_composite.config import CompositeConfig
from specdec_composite.plugin import propose


class CompositeContract(ProposerContract):
    plugin = "specdec_composite.plugin"
    distribution = "specdec-composite"
    choose = "first"

    @pytest.fixture
    def proposer(self) -> Proposer:
        pytest.importorskip("specdec_ngram")
        config = CompositeConfig(
            proposers=[
                {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3},
                {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
            ],
            choose=self.choose,
        )
        engine = engine_context(num_speculative_tokens=self.num_speculative_tokens, registry=Registry())
        proposer = propose(config, engine)
        proposer.load(None)
        return proposer


class TestFirst(CompositeContract):
    pass


class TestBest(CompositeContract):
    choose = "best"
