"""Checkpoint markers: which checkpoints a proposer may claim, told without importing it.

A proposer's distribution ships ``specdec_markers.toml`` beside the module its entry point names::

    [[checkpoint]]
    method = "wizard"                          # the entry point's name
    config = { architectures = "*Wizard*", "wizard_config.layers" = "*" }

    [[checkpoint]]
    method = "oracle"
    config = { num_oracle_layers = "[!0]*" }
    head = true                                # only where a head 'oracle.<model_type>' is installed

    [[checkpoint]]
    method = "parrot"
    config = { architectures = "*ForCausalLM" }
    language_model = true                      # such checkpoints are whole models, which can be targets as well

A table fits when each dotted key of ``config`` is in the checkpoint's ``config.json``, is not null and matches the
shell-style pattern, or one of a list of patterns. For lists in ``config.json`` one element is enough; numbers and
booleans are compared as JSON writes them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attrs import frozen

from specdec.errors import ModelLoadError, ModelNotFoundError
from specdec.registry.sources import package_folders
from specdec.wording import reason_of

FILE_NAME = "specdec_markers.toml"
_KEYS = {"method", "config", "head", "language_model"}


@frozen(kw_only=True)
class Marker:
    """One ``[[checkpoint]]`` table."""

    method: str
    config: Mapping[str, Any]
    head: bool = False
    language_model: bool = False

    def fits(self, config: Mapping[str, Any]) -> str | None:
        """What in ``config.json`` matches, in words; None when the marker does not fit."""
        reasons = [_match(config, key, pattern) for key, pattern in self.config.items()]
        return None if None in reasons else "config.json has " + ", ".join(filter(None, reasons))


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: it is not a JSON object.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        what = "is a single file" if checkpoint.is_file() else "holds no config.json"
        problem = f"{checkpoint} {what}, so its method cannot be detected: set speculative.method"
        raise ModelNotFoundError(problem, option="speculative.model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return config


def model_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """``model_type`` of the text part, then of the whole model."""
    parts = (config.get("text_config"), config)
    found = (part.get("model_type") for part in parts if isinstance(part, Mapping))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str)))


def shipped_markers(module: str) -> tuple[Marker, ...]:
    """The markers beside ``module``, which is not imported; empty when none are shipped.

    Raises:
        ValueError: the file is malformed; the message names it.
    """
    for folder in package_folders(module):
        path = folder / FILE_NAME
        if path.is_file():
            return tuple(_parse(path))
    return ()


def _parse(path: Path) -> Iterator[Marker]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["checkpoint"]
        for table in tables:
            if not _KEYS.issuperset(table):
                raise ValueError(f"unknown keys {sorted(set(table) - _KEYS)}; known: {sorted(_KEYS)}")
            marker = Marker(**table)
            if not isinstance(marker.config, Mapping) or not marker.config:
                raise ValueError("'config' must be a table with at least one key")
            yield marker
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is malformed: {type(error).__name__}: {error}") from error


def _match(config: Mapping[str, Any], key: str, pattern: Any) -> str | None:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    patterns = pattern if isinstance(pattern, list | tuple) else [pattern]
    values = value if isinstance(value, list) else [value]
    for item in values:
        text = item if isinstance(item, str) else json.dumps(item)
        if item is not None and any(fnmatchcase(text, str(wanted)) for wanted in patterns):
            return f"{key} = {text[:60]}"
    return None
