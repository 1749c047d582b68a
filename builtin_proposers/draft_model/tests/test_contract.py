"""The proposer keeps the contract of its interface, drafting one token at a time and all at once."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from specdec.attention.sdpa import SdpaBackend
from specdec.config import EngineConfig
from specdec.drafting import Proposer
from specdec.registry import Registry
from specdec.target.model import TargetModel, load_target
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec.types import Needs
from specdec_draft_model.config import DraftModelConfig
from specdec_draft_model.plugin import propose

VOCAB = 128


@pytest.fixture(scope="module")
def bound(target: str) -> TargetModel:
    model = load_target(EngineConfig(model=target, dtype="float32", device="cpu"))
    contract = ProposerContract
    model.bind(SdpaBackend(), model.allocate_kv_cache(contract.num_blocks, contract.block_size), Needs())
    return model


class DraftModelContract(ProposerContract):
    plugin = "specdec_draft_model.plugin"
    distribution = "specdec-draft-model"
    vocab_size = VOCAB
    shortest_text = 2
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def proposer(self, bound: TargetModel, other: str) -> Proposer:
        context = engine_context(
            target=bound,
            tokenizer=bound.tokenizer,
            vocab_size=VOCAB,
            registry=Registry(),
            num_speculative_tokens=self.num_speculative_tokens,
        )
        proposer = propose(DraftModelConfig(model=other, **self.options), context)
        proposer.load(bound)
        return proposer


class TestOneByOne(DraftModelContract):
    pass


class TestProbabilisticWithConfidence(DraftModelContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.05}
