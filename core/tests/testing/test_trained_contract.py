"""The contract of trained proposers: a checkpoint for each class, a proposer for each check."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from specdec.drafting import Proposer
from specdec.testing import chain_draft
from specdec.testing.contracts import TrainedProposerContract
from specdec.types import Draft, EngineContext, Needs, ProposalInput, ProposerCapabilities


class Favourites(Proposer):
    """Drafts the first tokens of its file, as many as there are."""

    needs = Needs(hidden_states=True)

    def __init__(self, favourites: list[int], context: EngineContext) -> None:
        assert context.target_info.vocab_size > max(favourites)
        self._favourites = favourites
        self.capabilities = ProposerCapabilities(max_draft_tokens=len(favourites))

    def load(self, target: Any) -> None:
        self.target = target

    def propose(self, batch: ProposalInput) -> Draft:
        assert batch.computed is not None
        assert self.target.info.hidden_size == batch.computed.target.hidden_states.shape[1]
        return chain_draft([self._favourites[:most] for most in batch.max_draft_tokens.tolist()])


class FavouritesContract(TrainedProposerContract):
    written: ClassVar[list[Path]] = []

    @classmethod
    def write_checkpoint(cls, target: Path, folder: Path) -> Path:
        assert (target / "config.json").is_file()
        cls.written.append(folder)
        (folder / "favourites.txt").write_text("3 1 4 1")
        return folder / "favourites.txt"

    def build(self, checkpoint: Path, context: EngineContext) -> Proposer:
        return Favourites([int(word) for word in checkpoint.read_text().split()], context)


class TestFavourites(FavouritesContract):
    vocab_size = 40
    hidden_size = 16

    @pytest.fixture(autouse=True)
    def _one_checkpoint(self) -> None:
        """A checkpoint is written for the class, and torch is held to one thread, unless nothing was built."""
        yield
        assert len(self.written) <= 1
        assert not self.written or torch.get_num_threads() == 1


def test_a_limit_above_what_the_weights_draft_is_pointed_out(tmp_path: Path) -> None:
    class TooMany(FavouritesContract):
        num_speculative_tokens = 5

    target = TinyTargetStub()
    checkpoint = TooMany.write_checkpoint(target.path(tmp_path), tmp_path)
    with pytest.raises(AssertionError, match="drafts at most 4 tokens: set num_speculative_tokens"):
        TooMany().loaded(target, checkpoint)  # type: ignore[arg-type]


class TinyTargetStub:
    """As much of a target as building needs."""

    tokenizer = None

    @property
    def info(self) -> Any:
        from specdec.testing import engine_context

        return engine_context().target_info

    def path(self, folder: Path) -> Path:
        (folder / "config.json").write_text("{}")
        return folder
