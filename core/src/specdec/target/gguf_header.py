"""Checks a GGUF file's header before anything slow reads it: magic, version, and whether all tensor bytes are there.

Layout (little-endian): magic ``GGUF``, version u32, tensor count u64, key count u64; keys (name, type u32, value);
tensors (name, dimensions u32, shape u64 each, type u32, offset u64); padding to ``general.alignment``; tensor data.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from attrs import frozen

from specdec.errors import ModelLoadError
from specdec.wording import reason_of

if TYPE_CHECKING:
    from pathlib import Path

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@frozen
class GGUFHeader:
    """What the header says."""

    architecture: str
    num_tensors: int
    required_bytes: int
    """The file size that the tensor table asks for."""


def read_header(path: Path) -> GGUFHeader:
    """Read and check a GGUF file's header.

    Raises:
        ModelLoadError: no GGUF file, an unknown version, damaged or truncated; the message names the file and the
            sizes.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = _read(file)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {reason_of(error)}") from error
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path}: not a readable GGUF file ({size:,} bytes): {_reason(error)}") from error
    if header.required_bytes > size:
        raise ModelLoadError(
            f"{path}: truncated: the file has {size:,} bytes, its tensors need {header.required_bytes:,}; "
            "fetch it again"
        )
    return header


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "it ends inside the header, or the header is damaged"


def _read(file: BinaryIO) -> GGUFHeader:
    magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"it starts with {magic!r}, not b'GGUF'")
    (version,) = _unpack(file, "I")
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(f"its version is {version}; supported are {', '.join(map(str, SUPPORTED_VERSIONS))}")
    num_tensors, num_keys = _unpack(file, "QQ")
    values: dict[str, Any] = {}
    for _ in range(num_keys):
        key = _string(file)
        (kind,) = _unpack(file, "I")
        values[key] = _value(file, kind)
    end = 0
    for _ in range(num_tensors):
        end = max(end, _tensor_end(file))
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    data_start = math.ceil(file.tell() / alignment) * alignment
    return GGUFHeader(str(values.get("general.architecture", "")), num_tensors, data_start + end)


def _tensor_end(file: BinaryIO) -> int:
    """One entry of the tensor table -> where its bytes end, from the start of the data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = _string(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > 8:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = _unpack(file, f"{dimensions}Q")
    kind, offset = _unpack(file, "IQ")
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name!r} has the unknown quantisation type {kind}") from None
    return int(offset + math.prod(shape) // block * block_bytes)


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > 1 << 32:
        raise ValueError("the header is damaged (a string of impossible length)")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("it ends inside the header")
    return data.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A scalar or string; arrays are skipped and give None."""
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise ValueError(f"the header is damaged (value type {kind})")
    item, count = _unpack(file, "IQ")
    if item in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[item]), 1)
    else:
        for _ in range(count):
            _value(file, item)
    return None
