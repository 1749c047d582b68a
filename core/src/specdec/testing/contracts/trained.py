"""The contract of proposers that draft with trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from specdec.testing.context import engine_context
from specdec.testing.contracts.proposer import ProposerContract
from specdec.testing.contracts.target import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.drafting.base import Proposer
    from specdec.target.model import TargetModel
    from specdec.types import EngineContext


class TrainedProposerContract(ProposerContract, TinyTarget):
    """The contract of proposers whose checkpoint was made for a target: heads, speculators, draft models.

    A subclass gives `write_checkpoint` and `build`; each further subclass is one more set of ``options``::

        class MineContract(TrainedProposerContract):
            plugin = "specdec_mine.plugin"
            distribution = "specdec-mine"

            @classmethod
            def write_checkpoint(cls, target, folder):
                return write_random(folder)

            def build(self, checkpoint, context):
                return build(MineConfig(model=str(checkpoint), **self.options), context)


        class TestChains(MineContract):
            pass


        class TestTrees(MineContract):
            options = {"speculative_token_tree": [[0], [1], [0, 0]]}
    """

    shortest_text = 2
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the method, beside its checkpoint."""

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        """Write random weights for the target; once for a class of checks.

        Args:
            target: the tiny target's directory.
            folder: an empty one.

        Returns:
            What `build` is given.
        """
        raise NotImplementedError(f"{cls.__name__} must define 'write_checkpoint'")

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        """Build the proposer for the target of ``context``; it is loaded afterwards."""
        raise NotImplementedError(f"{type(self).__name__} must define 'build'")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint that the proposers of the class are built with."""
        return cls.write_checkpoint(Path(str(tiny_target.info.path)), tmp_path_factory.mktemp("checkpoint"))

    @pytest.fixture
    def proposer(self, tiny_target: TargetModel, checkpoint: Path) -> Proposer:
        """A proposer of its own for every check."""
        return self.loaded(tiny_target, checkpoint)

    def loaded(self, target: TargetModel, checkpoint: Path) -> Proposer:
        """A proposer that is ready to draft, within the limits of the contract."""
        from specdec.registry import Registry

        context = engine_context(
            target_info=target.info,
            target=target,
            tokenizer=target.tokenizer,
            registry=Registry(),
            num_speculative_tokens=self.num_speculative_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
        )
        proposer = self.build(checkpoint, context)
        most = proposer.capabilities.max_draft_tokens
        assert most is None or most >= self.num_speculative_tokens, (
            f"the proposer drafts at most {most} tokens: set num_speculative_tokens of the contract to that"
        )
        with torch.inference_mode():
            proposer.load(target)
        return proposer
