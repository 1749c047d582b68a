"""The proposer keeps the contract of its interface, with random weights: chains and trees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from specdec.config import EngineConfig
from specdec.drafting import Proposer
from specdec.registry import Registry
from specdec.target.model import TargetModel, load_target
from specdec.testing import engine_context, tiny_model
from specdec.testing.contracts import ProposerContract
from specdec.testing.heads import tiny_head
from specdec_medusa.config import MedusaConfig
from specdec_medusa.medusa import build

VOCAB, WIDTH = 64, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a tiny target, and a head for it."""
    path = tmp_path_factory.mktemp("medusa")
    tiny_model("llama", path / "target", vocab_size=VOCAB, hidden_size=WIDTH)
    tiny_head("medusa", path / "target", path / "head")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[TargetModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_target(EngineConfig(model=str(folder / "target"), dtype="float32", device="cpu"))
    torch.set_num_threads(before)


class MedusaContract(ProposerContract):
    plugin = "specdec_medusa.plugin"
    distribution = "specdec-medusa"
    vocab_size = VOCAB
    hidden_size = WIDTH
    shortest_text = 2
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def proposer(self, folder: Path, target: TargetModel) -> Proposer:
        context = engine_context(
            target=target,
            vocab_size=VOCAB,
            registry=Registry(),
            num_speculative_tokens=self.num_speculative_tokens,
        )
        proposer = build(MedusaConfig(model=str(folder / "head"), **self.options), context)
        proposer.load(target)
        return proposer


class TestChains(MedusaContract):
    pass


class TestProbabilisticChains(MedusaContract):
    options: ClassVar[dict[str, Any]] = {"draft_sample_method": "probabilistic", "confidence_threshold": 0.02}


class TestStaticTrees(MedusaContract):
    options: ClassVar[dict[str, Any]] = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1]]}
