"""The proposer keeps the contract of its interface, drafting one token at a time and all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from specdec.drafting import Proposer
from specdec.testing import tiny_model
from specdec.testing.contracts import TrainedProposerContract
from specdec.types import EngineContext
from specdec_draft_model.config import DraftModelConfig
from specdec_draft_model.plugin import propose


class DraftModelContract(TrainedProposerContract):
    plugin = "specdec_draft_model.plugin"
    distribution = "specdec-draft-model"

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        return tiny_model("qwen2", folder, vocab_size=cls.vocab_size, num_hidden_layers=1, seed=5)

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        return propose(DraftModelConfig(model=str(checkpoint), **self.options), context)


class TestOneByOne(DraftModelContract):
    pass


class TestProbabilisticWithConfidence(DraftModelContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.05}
