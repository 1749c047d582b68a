"""Tiny checkpoints of the fuzz, made when first asked for and kept in one folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.testing import set_eos, tiny_model
from specdec.testing.heads import tiny_head

VOCAB = 128
WIDE_VOCAB = 300
"""Another tokenizer: byte-level, where `VOCAB` is too small for more than characters."""
MASK_ID = 9
"""What stands for tokens to draft in parallel."""

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
HEADS: dict[str, tuple[str, ...]] = {
    "eagle": tuple([name for name in _DENSE if name != "mistral"]),  # these have a format of their own
    "eagle3": (*_DENSE, "qwen3_moe", "gpt_oss"),
    "peagle": (*_DENSE, "qwen3_moe", "gpt_oss"),
    "medusa": (*_DENSE, "gemma2", "qwen3_moe", "gpt_oss", "phi3", "deepseek_v3"),
    "mlp_speculator": (*_DENSE, "gemma2", "qwen3_moe", "gpt_oss", "phi3", "deepseek_v3"),
}
"""Targets for which random heads of a layout are written."""


class Checkpoints:
    """Tiny models and heads in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def model(
        self, architecture: str, *, seed: int = 0, vocab_size: int = VOCAB, ends: Sequence[int] = (), **fields: Any
    ) -> str:
        """A tiny model, with end tokens if some are given."""
        parts = [architecture, str(seed), str(vocab_size), *(f"{key}{value}" for key, value in fields.items())]

        def write(path: Path) -> None:
            tiny_model(architecture, path, seed=seed, vocab_size=vocab_size, eos_token_id=None, **fields)
            if ends:
                set_eos(path, list(ends))

        return self._made("-".join([*parts, *(f"end{token}" for token in ends)]), write)

    def head(self, layout: str, target: str) -> str:
        """A random head for a target."""
        return self._made(f"{Path(target).name}-{layout}", lambda path: tiny_head(layout, target, path))

    def parallel_drafter(self, seed: int = 6) -> str:
        """A model that says it was trained to draft all tokens in one pass (PARD)."""

        def write(path: Path) -> None:
            tiny_model("llama", path, seed=seed, vocab_size=VOCAB, eos_token_id=None)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"pard_token": MASK_ID}))

        return self._made(f"parallel-{seed}", write)

    def _made(self, name: str, write: Callable[[Path], Any]) -> str:
        """The folder of that name; written beside and moved, so that another process may want it at the same time."""
        path = self._root / name
        if not path.is_dir():
            unfinished = self._root / f"{name}.{os.getpid()}"
            write(unfinished)
            with suppress(OSError):
                unfinished.rename(path)
        return str(path)
