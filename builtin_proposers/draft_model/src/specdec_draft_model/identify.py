"""Tells whole language models from the heads that are published in the same layout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specdec.drafting.tensor_names import tensor_names
from specdec.types import Identification

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METHOD = "draft_model"


def identified(checkpoint: Path) -> Identification | None:
    """Whether a checkpoint is a causal language model that transformers knows, with embeddings of its own.

    A head of the EAGLE family names a language model's class too; its first tensor in line is a fusion layer ``fc``.
    """
    from specdec.target.importing import import_transformers

    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    named = config.get("architectures") or []
    known = set(_flat(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    found = next((name for name in named if name in known), None)
    if found is None or _has_fusion(checkpoint):
        return None
    return Identification(method=METHOD, reason=f"config.json names the language model class {found}")


def _flat(names: Any) -> Iterator[str]:
    for name in names:
        yield from [name] if isinstance(name, str) else name


def _has_fusion(checkpoint: Path) -> bool:
    return any(name.split(".")[-2:-1] == ["fc"] for name in tensor_names(checkpoint))
