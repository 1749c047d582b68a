"""Which layers of the target an EAGLE-3 style head reads, from the several ways in which checkpoints say so.

Everything here is in boundaries: boundary k is the residual stream after k decoder layers, so it is the output of layer
k - 1 (`Needs.aux_layers` counts layers), and boundary 0 would be the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

LAYER_OUTPUT_KEYS = ("target_layer_ids",)
"""Keys whose ids count layers from 0, so that id i means the boundary behind layer i."""

BOUNDARY_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""Keys whose ids are boundaries."""


def aux_boundaries(config: Mapping[str, Any], num_layers: int, count: int, directory: Path) -> tuple[int, ...]:
    """The boundaries a head reads, ascending.

    Ids are looked for under `BOUNDARY_KEYS`, at the top level and in ``eagle_config``, then under `LAYER_OUTPUT_KEYS`;
    a head that names none reads the boundaries 2, L // 2 and L - 3 (Li et al. 2025, EAGLE-3).

    Args:
        config: the head's flat configuration.
        num_layers: decoder layers of the target (L).
        count: how many the head's first linear is made for.
        directory: the checkpoint, for messages.

    Raises:
        ModelLoadError: the ids do not exist in this target, repeat, or are not as many as the linear takes.
    """
    nested = config.get("eagle_config")
    places = [config, nested] if isinstance(nested, Mapping) else [config]
    ids, shift = None, 0
    for keys, offset in ((BOUNDARY_KEYS, 0), (LAYER_OUTPUT_KEYS, 1)):
        for place in places:
            ids = ids or next((place[key] for key in keys if place.get(key)), None)
        if ids:
            shift = offset
            break
    said = "names" if ids else "names no layers, which means"
    boundaries = tuple(sorted(int(i) + shift for i in ids)) if ids else (2, num_layers // 2, num_layers - 3)
    distinct = len(set(boundaries)) == len(boundaries)
    if not distinct or len(boundaries) != count or not all(1 <= b <= num_layers for b in boundaries):
        raise ModelLoadError(
            f"{directory}: it {said} the target's layers {list(boundaries)}, but its tensor fc.weight takes the hidden "
            f"states of {count} different layers, and they must lie between 1 and {num_layers}, the target's number of "
            "layers; give eagle_aux_hidden_state_layer_ids in speculative.head_config if you know them"
        )
    return boundaries
