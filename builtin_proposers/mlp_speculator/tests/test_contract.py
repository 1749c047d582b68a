"""The proposer keeps the contract of its interface, with random weights: chains and trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from specdec.drafting import Proposer
from specdec.testing.contracts import TrainedProposerContract
from specdec.testing.heads import tiny_head
from specdec.types import EngineContext
from specdec_mlp_speculator.config import MlpSpeculatorConfig
from specdec_mlp_speculator.speculator import build


class MlpSpeculatorContract(TrainedProposerContract):
    plugin = "specdec_mlp_speculator.plugin"
    distribution = "specdec-mlp-speculator"
    num_speculative_tokens = 3

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        return tiny_head("mlp_speculator", target, folder)

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        return build(MlpSpeculatorConfig(model=str(checkpoint), **self.options), context)


class TestChains(MlpSpeculatorContract):
    pass


class TestProbabilisticChains(MlpSpeculatorContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.02}


class TestStaticTrees(MlpSpeculatorContract):
    options: ClassVar[dict[str, Any]] = {"speculative_token_tree": [[0], [1], [0, 0]]}


class TestDynamicTrees(MlpSpeculatorContract):
    options: ClassVar[dict[str, Any]] = {"tree_top_k": 2, "tree_depth": 3}
