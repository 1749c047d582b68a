"""The proposer keeps the contract of its interface, with random weights: chains and trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from specdec.drafting import Proposer
from specdec.testing.contracts import TrainedProposerContract
from specdec.testing.heads import tiny_head
from specdec.types import EngineContext
from specdec_medusa.config import MedusaConfig
from specdec_medusa.medusa import build


class MedusaContract(TrainedProposerContract):
    plugin = "specdec_medusa.plugin"
    distribution = "specdec-medusa"

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        return tiny_head("medusa", target, folder)

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        return build(MedusaConfig(model=str(checkpoint), **self.options), context)


class TestChains(MedusaContract):
    pass


class TestProbabilisticChains(MedusaContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.02}


class TestStaticTrees(MedusaContract):
    options: ClassVar[dict[str, Any]] = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1]]}
