"""What the parents of a draft tree's nodes say about it, on plain lists."""

from __future__ import annotations

from collections.abc import Sequence


def node_depths(parents: Sequence[int]) -> list[int]:
    """How many draft tokens have to be accepted to reach each node, itself included.

    Args:
        parents: as in `specdec.types.Draft`: before their children, -1 for those that follow the text.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
