"""Reads the checkpoint of a draft head: configuration and tensors, with every misfit named at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.drafting.tensor_names import WEIGHT_FILES, number_of
from specdec.drafting.tensor_names import Shape as Shape
from specdec.errors import ModelLoadError, ModelNotFoundError, PluginUnsuitableError
from specdec.target.loading import check_weight_files
from specdec.target.resolve import resolve_model
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from specdec.types import EngineContext, TargetInfo

MODEL_OPTION = "speculative.model"
"""The setting that names a head."""

CONFIG_FILES = ("config.json", "params.json")
"""Hugging Face's configuration, and that of Mistral's native format."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")

NESTED_TABLES = ("model", "transformer_layer_config")
"""Tables of a configuration whose keys belong to the head's layers."""


def resolve_head(name: str, cache_dir: str | None = None) -> Path:
    """Find a head's checkpoint directory: a directory here, or a repository on the hub.

    Args:
        name: what the user gave as ``speculative.model``.
        cache_dir: specdec's cache directory.

    Raises:
        ModelNotFoundError: nothing is there under this name.
    """
    path = Path(name).expanduser()
    if path.is_dir() and any((path / file).is_file() for file in CONFIG_FILES):
        return path
    found = resolve_model(name, cache_dir, option=MODEL_OPTION)
    if found.kind == "gguf":
        problem = f"{name!r} is a GGUF file, which holds a whole language model; give the directory of a head"
        raise ModelNotFoundError(problem, option=MODEL_OPTION)
    return found.path


def check_head(method: str, name: str, engine: EngineContext, patterns: Sequence[str] = WEIGHT_FILES) -> Path:
    """Find a head and see that it is one for the method, without reading weights: for the hook `check`.

    Whether it was made for the target say `check_sizes` or, with other names for the sizes, `check_target`.

    Args:
        method: which is to use the head.
        name: what the user gave as ``speculative.model``.
        engine: facts about the engine; its target need not be loaded.
        patterns: where weights may be; see `specdec.drafting.tensor_names.WEIGHT_FILES`.

    Returns:
        The head's directory.

    Raises:
        ModelNotFoundError: nothing is there under this name.
        ConfigError: it is a checkpoint of another method.
        ModelLoadError: its configuration cannot be read, or there are no weights.
    """
    directory = resolve_head(name, engine.settings.get("cache_dir"))
    holds_weights = any(file.suffix in WEIGHT_SUFFIXES for file in directory.iterdir())
    if engine.registry is not None and holds_weights:  # without any, other methods know it by its configuration alone
        engine.registry.check_method(method, directory)
    weight_files(directory, patterns)
    return directory


def check_sizes(directory: Path, config: Mapping[str, Any], info: TargetInfo) -> None:
    """Refuse a head whose configuration has sizes of another target; what it does not say is not compared.

    Raises:
        PluginUnsuitableError: both sizes are named.
    """
    hidden_size = config.get("target_hidden_size") or config.get("hidden_size") or info.hidden_size
    vocab_size = config.get("vocab_size") or info.vocab_size
    sizes = {"hidden_size": (int(hidden_size), info.hidden_size), "vocabulary": (int(vocab_size), info.vocab_size)}
    check_target(directory, info, **sizes)


def check_target(directory: Path, info: TargetInfo, **sizes: tuple[int, int]) -> None:
    """Refuse a head that was made for another target.

    Args:
        directory: the checkpoint.
        info: the target.
        sizes: the head's and the target's number, by what they count.

    Raises:
        PluginUnsuitableError: numbers differ; all are named.
    """
    reasons = [
        f"{what.replace('_', ' ')} {own} where the target has {wanted}"
        for what, (own, wanted) in sizes.items()
        if own != wanted
    ]
    if reasons:
        raise PluginUnsuitableError(
            f"the head {directory} was made for another target than {info.model!r}: {'; '.join(reasons)}. Set "
            f"{MODEL_OPTION} to a head for this target",
            kind="head",
            reasons=reasons,
        )


def read_head_config(directory: Path) -> dict[str, Any]:
    """The configuration of a head as one flat dictionary.

    Some keep the layers' settings in a table of their own (``transformer_layer_config`` in the ``speculators`` library,
    ``model`` in an older layout of vLLM); these come first, and the head's own keys overlay them.

    Raises:
        ModelNotFoundError: there is neither ``config.json`` nor ``params.json``.
        ModelLoadError: it is no readable JSON object.
    """
    file = next((directory / name for name in CONFIG_FILES if (directory / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{directory} holds no {' or '.join(CONFIG_FILES)}", option=MODEL_OPTION)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    tables = [config[name] for name in NESTED_TABLES if isinstance(config.get(name), dict)]
    return {key: value for table in (*tables, config) for key, value in table.items()}


class HeadCheckpoint:
    """The tensors of a head, under the names a loader wants."""

    def __init__(
        self,
        directory: Path,
        rename: Callable[[str], str | None] = lambda name: name,
        patterns: Sequence[str] = WEIGHT_FILES,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Read a directory.

        Args:
            directory: the checkpoint.
            rename: gives the loader's name for a stored one; None leaves the tensor out.
            patterns: where weights may be; see `WEIGHT_FILES`.
            overrides: keys of the configuration that shall be otherwise.

        Raises:
            ModelLoadError: no weights, or files that cannot be read.
        """
        self.directory = directory
        self.config = {**read_head_config(directory), **(overrides or {})}
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in _read(directory, patterns).items():
            wanted = rename(name)
            if wanted is not None:
                self._tensors[wanted] = tensor

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def require(self, name: str) -> Any:
        """A key of the configuration.

        Raises:
            ModelLoadError: it is missing.
        """
        value = self.config.get(name)
        if value is None:
            raise ModelLoadError(f"{self.directory}: its configuration has no {name!r}")
        return value

    def number_of(self, prefix: str) -> int:
        """How many entries ``prefix.0.…``, ``prefix.1.…`` exist, by the largest index."""
        return number_of(prefix, self._tensors)

    def take(
        self, required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, *, unused: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        """All tensors, after a check that they are exactly those a head consists of.

        Args:
            required: shapes by name; all must be there.
            optional: shapes by name; may be missing.
            unused: names that may be there and mean nothing to the head.

        Returns:
            The tensors by name, in the dtype they are stored in, on the CPU.

        Raises:
            ModelLoadError: tensors are missing, surplus or of another shape; all are named.
        """
        expected = {**(optional or {}), **required}
        found = self.shapes
        missing = [name for name in required if name not in found]
        surplus = [name for name in found if name not in expected and name not in set(unused)]
        shapes = [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != tuple(shape)
        ]
        listed = {"missing": missing, "not part of the head": surplus, "of another shape": shapes}
        problems = [f"{label}: {_some(names)}" for label, names in listed.items() if names]
        if problems:
            raise ModelLoadError(f"{self.directory}: its tensors do not fit. {'; '.join(problems)}")
        return {name: self._tensors[name] for name in expected if name in found}


def weight_files(directory: Path, patterns: Sequence[str] = WEIGHT_FILES) -> list[Path]:
    """The files that hold a head's weights.

    Raises:
        ModelLoadError: there are none, or a safetensors file is not whole.
    """
    files = next((found for pattern in patterns if (found := sorted(directory.glob(pattern)))), None)
    if files is None:
        raise ModelLoadError(f"{directory}: holds no weights (looked for {' and '.join(patterns)})")
    if files[0].suffix == ".safetensors":
        check_weight_files(directory)
    return files


def _read(directory: Path, patterns: Sequence[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory, patterns):
        tensors |= _read_file(file)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {reason_of(error)}") from error
    except Exception as error:  # pickle's own errors: something other than plain tensors
        raise ModelLoadError(
            f"{file}: is not read, because it holds more than tensors ({type(error).__name__}); convert it to "
            "safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ModelLoadError(f"{file}: holds something other than named tensors")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
