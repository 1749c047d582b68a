"""Reads a checkpoint directory into a transformers model: configuration, checks, weights, device."""

from __future__ import annotations

import json
import logging
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.errors import ConfigError, ModelLoadError, SpecdecError, UnsupportedModelError
from specdec.target.importing import import_transformers, without_symbols
from specdec.target.support import architecture_reasons, refuse
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

GGUF_DTYPE = "bfloat16"
"""What ``dtype = "auto"`` means for GGUF files, whose weights are quantised."""


def choose_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: torch does not know the device, or it is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device: {device!r} cannot be used here ({reason_of(error)}); "
            "use 'auto', 'cpu' or a device torch can reach",
            path="device",
        ) from error
    return chosen


def load_config(name: str, path: Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a checkpoint directory.

    Raises:
        ModelLoadError: ``config.json`` cannot be read.
        UnsupportedModelError: transformers does not know the architecture, or it needs ``trust_remote_code``.
    """
    import_transformers()
    from transformers import AutoConfig

    file = path / "config.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {reason_of(error)}") from error
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not trust_remote_code and isinstance(stored, dict) and "auto_map" in stored:
            reason = "its code comes with the checkpoint; set trust_remote_code = true if you trust where it comes from"
            raise refuse(name, str(stored.get("model_type")), [reason]) from error
        if isinstance(stored, dict) and not _known_model_type(stored.get("model_type")):
            reason = f"the installed transformers does not know this architecture ({reason_of(error)})"
            raise refuse(name, str(stored.get("model_type")), [reason]) from error
        raise ModelLoadError(f"{file}: not a valid configuration: {reason_of(error)}") from error


def load_model(
    name: str, path: Path, config: Any, *, dtype: str, device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """Load the weights of a causal language model, or of the class that holds one among other modalities.

    The model is in evaluation mode, without gradients. On the CPU it owns its memory except for the weights of linears,
    which may lie in the mapped files until `own_linears` copies those that have not been replaced.

    Args:
        name: as the user named the model, for messages.
        path: checkpoint directory.
        config: from `load_config`.
        dtype: 'auto' or a key of `DTYPES`.
        device: where the weights go.
        trust_remote_code: run Python files of the checkpoint.

    Raises:
        ModelLoadError: files are truncated, unreadable or missing; tensors are missing or have other shapes.
        UnsupportedModelError: the architecture cannot be a target; all reasons are listed.
    """
    auto_class, model_class = _model_class(name, config, trust_remote_code)
    text_config = config.get_text_config()
    reasons = architecture_reasons(text_config, model_class) if model_class is not None else []
    if reasons:
        raise refuse(name, config.model_type, reasons)
    check_weight_files(path)
    with _quiet_transformers(), device:
        model, info = _from_pretrained(auto_class, path, dtype, trust_remote_code)
    _check_tensors(path, info)
    model.eval().requires_grad_(False)
    _own_memory(model)
    if model.dtype not in DTYPES.values():
        supported = ", ".join(DTYPES)
        raise ModelLoadError(f"{path}: its weights are {model.dtype}; set dtype to one of {supported}")
    return model


def check_weight_files(path: Path) -> None:
    """See that a directory holds weights and that its safetensors files are whole.

    Raises:
        ModelLoadError: no weights, a shard named by the index is missing, or a file is truncated or damaged.
    """
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index}: not a readable index: {reason_of(error)}") from error
        missing = sorted(names - {file.name for file in files})
        if missing:
            raise ModelLoadError(f"{path}: files named in {index.name} are missing: {', '.join(missing)}")
    elif not files and not any(path.glob("pytorch_model*.bin")):
        raise ModelLoadError(f"{path}: holds no weights (looked for *.safetensors and pytorch_model*.bin)")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (header_size,) = struct.unpack("<Q", opened.read(8))
            if header_size > size:
                raise ValueError(f"the header would take {header_size:,} bytes")
            header = json.loads(opened.read(header_size))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ModelLoadError(f"{file}: not a readable safetensors file ({size:,} bytes): {reason_of(error)}") from error
    needed = 8 + header_size + max(ends, default=0)
    if needed > size:
        raise ModelLoadError(
            f"{file}: truncated: the file has {size:,} bytes, its tensors need {needed:,}; fetch it again"
        )


def _model_class(name: str, config: Any, trust_remote_code: bool) -> tuple[Any, type | None]:
    """The auto class to load with and, unless it comes with the checkpoint, the model class it leads to."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM, None
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto_class._model_mapping:
            found = auto_class._model_mapping[type(config)]
            return auto_class, found[0] if isinstance(found, (tuple, list)) else found
    reason = "transformers has no causal language model for this configuration, alone or inside a multimodal class"
    raise refuse(name, config.model_type, [reason])


def _from_pretrained(
    auto_class: Any, path: Path, dtype: str, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    def read() -> tuple[nn.Module, dict[str, Any]]:
        loaded: tuple[nn.Module, dict[str, Any]] = auto_class.from_pretrained(
            path,
            dtype="auto" if dtype == "auto" else DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            weights_only=True,
            ignore_mismatched_sizes=True,  # `_check_tensors` refuses them and names them
        )
        return loaded

    try:
        with suppress(RuntimeError), without_symbols():
            return read()
        return read()  # a model whose angles are made of tensors on both devices
    except SpecdecError:
        raise
    except ImportError as error:
        raise ModelLoadError(f"{path}: loading it needs a package that is not installed: {reason_of(error)}") from error
    except Exception as error:
        raise ModelLoadError(f"{path}: cannot be loaded: {type(error).__name__}: {reason_of(error)}") from error


def _check_tensors(path: Path, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(
        f"{key} {list(stored)} instead of {list(wanted)}" for key, stored, wanted in info.get("mismatched_keys", ())
    )
    if missing:
        raise ModelLoadError(f"{path}: {len(missing)} tensors are missing: {_some(missing)}")
    if mismatched:
        raise ModelLoadError(
            f"{path}: {len(mismatched)} tensors have another shape than config.json says: {_some(mismatched)}"
        )
    surplus = sorted(info.get("unexpected_keys", ()))
    if surplus:
        logger.warning(
            "%s: %d tensors are not part of the model and were left out: %s", path, len(surplus), _some(surplus)
        )


def _own_memory(model: nn.Module) -> None:
    """Copy tensors out of memory-mapped files, all but the weights of linears: nearly all of those are replaced by
    packed copies."""
    linears = {id(weight) for weight in _linear_weights(model)}
    _copy(tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in linears)


def own_linears(model: nn.Module) -> None:
    """Copy the weights of linears too, so that the files' pages do not stay resident, nor change under an engine."""
    _copy(_linear_weights(model))


def _linear_weights(model: nn.Module) -> list[Tensor]:
    """Each once, also where linears share it."""
    weights = (module.weight for module in model.modules() if type(module) is nn.Linear)
    return list({id(weight): weight for weight in weights if weight is not None}.values())


def _copy(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars and load report; what matters is checked and reported here."""
    from transformers.utils import logging as transformers_logging

    had_bar, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def _known_model_type(model_type: object) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


__all__ = [
    "DTYPES",
    "GGUF_DTYPE",
    "UnsupportedModelError",
    "check_weight_files",
    "choose_device",
    "load_config",
    "load_model",
    "own_linears",
]
