"""The proposer keeps the contract of its interface, with a head made for the purpose: chains and trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from specdec.attention.sdpa import SdpaBackend
from specdec.drafting import DraftHead, Proposer
from specdec.drafting.layers import LlamaLayer, LlamaWeights
from specdec.drafting.modules import Rotary, linear, target_embedding, target_output
from specdec.drafting.recurrent import Block, FeaturePredictingHead, FeaturePrediction, Vocabulary
from specdec.registry import Registry
from specdec.target.model import TargetModel
from specdec.testing import engine_context
from specdec.testing.contracts import ProposerContract
from specdec.testing.models import tiny_module
from specdec.types import Needs
from specdec_eagle.config import EagleConfig
from specdec_eagle.eagle import EagleProposer

VOCAB, WIDTH = 64, 32


@pytest.fixture(scope="module")
def bound() -> Iterator[TargetModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = TargetModel.from_model(tiny_module("llama", vocab_size=VOCAB, hidden_size=WIDTH), name="tiny")
    contract = ProposerContract
    model.bind(SdpaBackend(), model.allocate_kv_cache(contract.num_blocks, contract.block_size), Needs())
    yield model
    torch.set_num_threads(before)


def random_head(target: TargetModel) -> DraftHead:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    weights = LlamaWeights(
        query=random(32, WIDTH),
        key=random(16, WIDTH),
        value=random(16, WIDTH),
        output=random(WIDTH, 32),
        post_norm=1 + random(WIDTH),
        gate=random(48, WIDTH),
        up=random(48, WIDTH),
        down=random(WIDTH, 48),
        eps=1e-5,
        head_dim=8,
    )
    rotary = Rotary({"hidden_size": WIDTH, "num_attention_heads": 4}, weights.query)
    parts = FeaturePrediction(
        join=linear(random(WIDTH, 2 * WIDTH)), blocks=[Block(LlamaLayer(weights, 0))], rotary=rotary
    )
    vocabulary = Vocabulary(embed=target_embedding(target), output=target_output(target), size=VOCAB)
    return FeaturePredictingHead(parts, vocabulary)


class EagleContract(ProposerContract):
    plugin = "specdec_eagle.eagle_plugin"
    distribution = "specdec-eagle"
    vocab_size = VOCAB
    hidden_size = WIDTH
    shortest_text = 2
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def proposer(self, bound: TargetModel) -> Proposer:
        context = engine_context(
            target=bound,
            vocab_size=VOCAB,
            registry=Registry(),
            num_speculative_tokens=self.num_speculative_tokens,
        )
        proposer = EagleProposer(random_head(bound), EagleConfig(model="made here", **self.options), context)
        proposer.load(bound)
        return proposer


class TestChains(EagleContract):
    pass


class TestProbabilisticChains(EagleContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.05}


class TestStaticTrees(EagleContract):
    options: ClassVar[dict[str, Any]] = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1]]}


class TestDrawnTrees(EagleContract):
    options: ClassVar[dict[str, Any]] = {
        "speculative_token_tree": [[0], [1], [0, 0], [0, 1]],
        "draft_sample_method": "probabilistic",
    }


class TestDynamicTrees(EagleContract):
    options: ClassVar[dict[str, Any]] = {"tree_top_k": 2, "tree_depth": 3}
