"""The file that keeps past responses between runs.

A safetensors file: all tokens (int32), the length and the scope of each response, and in its header a version, a digest
of the contents, the scopes' names, and a fingerprint of the model and tokenizer that the token ids belong to. It is
written beside and put in place at once, readable for its owner alone. Nothing that is wrong with it stops an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specdec.types import EngineContext
    from specdec_suffix.config import SuffixConfig

logger = logging.getLogger(__name__)

FORMAT = "specdec-suffix"
VERSION = "1"


class UnusableCacheError(Exception):
    """The file is damaged, or not of this kind."""


class CacheFile:
    """Loads and saves the responses of one engine."""

    def __init__(self, config: SuffixConfig, engine: EngineContext) -> None:
        self.path = Path(str(config.suffix_cache_path)).expanduser()
        self._interval = config.suffix_save_interval
        self._fingerprint = fingerprint(engine)
        self._is_writable = True
        self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to save while the engine runs."""
        return self._interval > 0 and time.monotonic() - self._saved >= self._interval

    def load(self) -> list[tuple[str, np.ndarray]]:
        """Scope and tokens (int64) of every response, the oldest first; none, with a warning, if the file is unusable.

        A damaged file is moved aside. One of another model is left alone, and this engine does not write to it.
        """
        if not self.path.exists():
            return []
        try:
            header, arrays = _read(self.path)
            if header["fingerprint"] != self._fingerprint:
                self._is_writable = False
                logger.warning(
                    "the suffix cache %s holds responses of another model or tokenizer (%s; this engine: %s): it is "
                    "not used and not changed. Set speculative.suffix_cache_path to another file for this model.",
                    self.path,
                    header["fingerprint"],
                    self._fingerprint,
                )
                return []
            return _responses(header, arrays)
        except OSError as error:
            self._is_writable = False
            logger.warning("the suffix cache %s cannot be read and is not used: %s", self.path, error)
        except Exception as error:  # whatever a damaged file makes a parser raise
            self._move_aside(error)
        return []

    def save(self, responses: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write all responses; a file that cannot be written is a warning, once."""
        self._saved = time.monotonic()
        if not self._is_writable:
            return
        try:
            _write(self.path, self._fingerprint, list(responses))
        except OSError as error:
            self._is_writable = False
            logger.warning("the suffix cache %s cannot be written and is not kept: %s", self.path, error)

    def _move_aside(self, error: Exception) -> None:
        aside = self.path.with_name(self.path.name + ".damaged")
        with contextlib.suppress(OSError):
            self.path.replace(aside)
        logger.warning(
            "the suffix cache %s is damaged (%s) and is not used; it was moved to %s and a new one begins",
            self.path,
            error or type(error).__name__,
            aside,
        )


def fingerprint(engine: EngineContext) -> str:
    """What the token ids of an engine mean: model type, vocabulary size and a digest of the tokenizer's vocabulary."""
    info, tokenizer = engine.target_info, engine.tokenizer
    digest = "none"
    if tokenizer is not None and hasattr(tokenizer, "get_vocab"):
        entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]
    return f"{Path(info.model).name} ({info.model_type}), vocabulary {info.vocab_size}, tokenizer {digest}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import safe_open

    with safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UnusableCacheError("it is no suffix cache")
        if metadata.get("version") != VERSION:
            raise UnusableCacheError(f"its version is {metadata.get('version')}, not {VERSION}")
        arrays = {name: file.get_tensor(name) for name in ("tokens", "lengths", "scopes")}
    header = {name: metadata[name] for name in ("fingerprint", "digest")} | {"names": json.loads(metadata["names"])}
    if _digest(arrays, header["names"]) != header["digest"]:
        raise UnusableCacheError("its contents do not fit their digest")
    return header, arrays


def _responses(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    ends = np.cumsum(arrays["lengths"])
    parts = np.split(arrays["tokens"].astype(np.int64), ends[:-1]) if len(ends) else []
    return [(header["names"][scope], part) for scope, part in zip(arrays["scopes"].tolist(), parts, strict=True)]


def _write(path: Path, made_for: str, responses: list[tuple[str, np.ndarray]]) -> None:
    from safetensors.numpy import save

    names = list(dict.fromkeys(scope for scope, _ in responses))
    index = {name: i for i, name in enumerate(names)}
    arrays = {
        "tokens": np.concatenate([np.empty(0, dtype=np.int32), *(tokens.astype(np.int32) for _, tokens in responses)]),
        "lengths": np.array([len(tokens) for _, tokens in responses], dtype=np.int64),
        "scopes": np.array([index[scope] for scope, _ in responses], dtype=np.int32),
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": made_for,
        "names": json.dumps(names),
        "digest": _digest(arrays, names),
    }
    _replace(path, save(arrays, metadata))


def _digest(arrays: dict[str, np.ndarray], names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps(names).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _replace(path: Path, contents: bytes) -> None:
    """Write a file so that at any moment the old or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
