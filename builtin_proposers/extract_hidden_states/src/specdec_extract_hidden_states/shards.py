"""The files: shards of tensors, and a manifest of what is in them.

``shard-00000.safetensors`` holds requests one after another; of request 3 the tensors ``3.token_ids`` (int64 [n]),
``3.layer_2`` ([n - 1, H], position by position) for each layer, and ``3.final``. ``manifest.jsonl`` begins with a line
about the model and the layers; then each request has a line with its id, shard, number there, and count of tokens.

A shard is put in place whole, and its lines are added after that. What a crash leaves half done is not in the manifest
and is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError
from specdec.files import save_tensors
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

MANIFEST = "manifest.jsonl"
VERSION = 1


class ShardWriter:
    """Writes the shards of a directory and knows which requests are there."""

    def __init__(self, folder: Path, header: Mapping[str, Any], shard_size: int) -> None:
        """Begin or continue a directory.

        Args:
            folder: of the shards.
            header: what every request in it has in common: model, layers, types.
            shard_size: bytes of tensors after which a shard is written.

        Raises:
            ConfigError: the folder holds something else, or cannot be written.
        """
        self._folder = folder
        self._header = {"version": VERSION, **header}
        self._shard_size = shard_size
        self._tensors: dict[str, Tensor] = {}
        self._lines: list[str] = []
        self._known: set[bytes] = set()
        self._next_shard = 0
        self.num_written = 0
        """Requests in the manifest."""
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"speculative.output_path {str(folder)!r} cannot be used: {reason_of(error)}",
                path="speculative.output_path",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that wait to be written."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __contains__(self, record_id: str) -> bool:
        return _digest(record_id) in self._known

    def add(self, record_id: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take one request; the shard is written when it is large enough."""
        number = len(self._lines)
        self._tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        line = {"id": record_id, "shard": self._shard_name, "index": number, **facts}
        self._lines.append(json.dumps(line) + "\n")
        self._known.add(_digest(record_id))
        if self.nbytes >= self._shard_size:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one shard."""
        if not self._lines:
            return
        path = self._folder / self._shard_name
        part = path.with_suffix(".part")
        save_tensors(self._tensors, part)
        part.replace(path)
        with (self._folder / MANIFEST).open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
            file.flush()
            os.fsync(file.fileno())
        self.num_written += len(self._lines)
        self._next_shard += 1
        self._tensors, self._lines = {}, []

    @property
    def _shard_name(self) -> str:
        return f"shard-{self._next_shard:05}.safetensors"

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / MANIFEST
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not whole:  # new, or a crash came before the first line was whole
            path.write_text(json.dumps(self._header) + "\n", encoding="utf-8")
            return
        if whole != text:  # the last line was cut by a crash
            path.write_text(whole, encoding="utf-8")
        header, *records = self._parsed(whole)
        if header != self._header:
            different = [key for key in {**self._header, **header} if header.get(key) != self._header.get(key)]
            raise ConfigError(
                f"speculative.output_path {str(self._folder)!r} holds hidden states made with other settings: "
                + "; ".join(f"{key} {header.get(key)!r}, now {self._header.get(key)!r}" for key in different)
                + ". Use another directory, or the same settings.",
                path="speculative.output_path",
            )
        self._known = {_digest(record["id"]) for record in records}
        self.num_written = len(records)
        self._next_shard = max((int(record["shard"][6:11]) + 1 for record in records), default=0)

    def _parsed(self, text: str) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in text.splitlines()]
        except ValueError as error:
            raise ConfigError(
                f"speculative.output_path {str(self._folder)!r}: {MANIFEST} is damaged: {error}. Use another one.",
                path="speculative.output_path",
            ) from error


def _digest(record_id: str) -> bytes:
    return hashlib.blake2b(record_id.encode(), digest_size=16).digest()


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a directory, and one entry for each request."""
    header, *records = map(json.loads, (folder / MANIFEST).read_text(encoding="utf-8").splitlines())
    return header, records


def read_request(folder: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one request by name: ``token_ids``, ``layer_2``, …, ``final``."""
    from safetensors import safe_open

    prefix = f"{record['index']}."
    with safe_open(str(folder / record["shard"]), framework="pt") as file:
        return {
            name.removeprefix(prefix): file.get_tensor(name) for name in list(file.keys()) if name.startswith(prefix)
        }
