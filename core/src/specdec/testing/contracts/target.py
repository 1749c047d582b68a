"""A target for contracts of plugins that are loaded for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.target.model import TargetModel


class TinyTarget:
    """Gives the classes of a contract the fixture `tiny_target`: a random Llama of the contract's sizes."""

    vocab_size: ClassVar[int] = 64
    hidden_size: ClassVar[int] = 32
    num_target_layers: ClassVar[int] = 2
    block_size: ClassVar[int] = 4
    num_blocks: ClassVar[int] = 2048

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_target(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
        """A loaded target in float32 on the CPU, with a tokenizer, over a cache; ``info.path`` is its directory.

        Torch computes with one thread while it is there.
        """
        from specdec.attention.sdpa import SdpaBackend
        from specdec.config import from_kwargs
        from specdec.target.model import load_target
        from specdec.testing.models import tiny_model
        from specdec.types import Needs

        path = tiny_model(
            "llama",
            tmp_path_factory.mktemp("target"),
            vocab_size=cls.vocab_size,
            hidden_size=cls.hidden_size,
            num_hidden_layers=cls.num_target_layers,
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        target = load_target(from_kwargs(str(path), dtype="float32", device="cpu"))
        target.bind(SdpaBackend(), target.allocate_kv_cache(cls.num_blocks, cls.block_size), Needs())
        yield target
        torch.set_num_threads(threads)
