"""The proposer keeps the contract of its interface, with a head made for the purpose: chains and trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from specdec.drafting import DraftHead, MaskRow, Proposer
from specdec.drafting.layers import LlamaLayer, LlamaWeights
from specdec.drafting.modules import Rotary, linear, target_embedding, target_output
from specdec.drafting.recurrent import Block, FeaturePredictingHead, FeaturePrediction, Vocabulary
from specdec.target.model import TargetModel
from specdec.testing.contracts import TrainedProposerContract
from specdec.types import EngineContext
from specdec_eagle.config import EagleConfig
from specdec_eagle.eagle import EagleProposer

VOCAB, WIDTH = 64, 32


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


class EagleContract(TrainedProposerContract):
    plugin = "specdec_eagle.eagle_plugin"
    distribution = "specdec-eagle"
    vocab_size, hidden_size = VOCAB, WIDTH

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        return folder

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        return EagleProposer(random_head(context.target), EagleConfig(model="made here", **self.options), context)


class TestChains(EagleContract):
    pass


class TestProbabilisticChains(EagleContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.05}


class TestParallelChains(EagleContract):
    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        head = random_head(context.target)
        head.mask_row = MaskRow(VOCAB - 1, (torch.linspace(-1, 1, WIDTH)[None],))
        return EagleProposer(head, EagleConfig(model="made here", **self.options), context)


class TestProbabilisticParallelChains(TestParallelChains):
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
