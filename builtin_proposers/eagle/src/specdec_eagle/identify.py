"""Tells EAGLE and EAGLE-3 heads from the names of their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.drafting.tensor_names import tensor_names
from specdec.types import Identification

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_FUSIONS = ("fc.weight", "fusion_fc.weight", "eagle_linear.weight")
_EAGLE3 = ("midlayer.", "layers.0.hidden_norm.", "mask_hidden")


def identify_as(method: str, checkpoint: Path) -> Identification | None:
    """An answer when a checkpoint is a head of this method, else None."""
    found = _method_of(tensor_names(checkpoint))
    return None if found is None or found[0] != method else Identification(method=method, reason=found[1])


def _method_of(names: Iterable[str]) -> tuple[str, str] | None:
    """The method and the tensor that says so."""
    plain = [name.removeprefix("model.") for name in names]
    for name in plain:
        if name.startswith(_EAGLE3):
            return "eagle3", f"it holds a tensor {name!r}"
    fusion = next((name for name in plain if name in _FUSIONS), None)
    has_layer = any(name.startswith(("layers.", "transformer.", "eagle_layers.")) for name in plain)
    return ("eagle", f"it holds a tensor {fusion!r} beside decoder layers") if fusion and has_layer else None
