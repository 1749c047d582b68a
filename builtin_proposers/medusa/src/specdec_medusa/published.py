"""The trees that the authors of Medusa (Cai et al. 2024) published, by their names.

Each is written as numbers of children: 01:3 gives three children to the node with rank 1 below the node with rank 0.
"""

from __future__ import annotations

from specdec.drafting.token_trees import Path, tree_from_counts


def _counts(text: str) -> dict[str, int]:
    """From "root:10 0:10 00:3" to children by parent."""
    pairs = (item.split(":") for item in text.split())
    return {"" if parent == "root" else parent: int(count) for parent, count in pairs}


PUBLISHED: dict[str, str] = {
    "mc_sim_7b_63": (
        "root:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 000:2"
    ),
    "vicuna_7b_stage1": (
        "root:10 0:10 1:7 2:4 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 05:1 10:2 20:1 000:1"
    ),
    "vicuna_7b_stage1_ablation": (
        "root:10 0:10 1:4 2:2 3:2 4:1 5:1 6:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 "
        "001:1 002:1 010:1"
    ),
    "vicuna_7b_stage2": (
        "root:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1"
    ),
    "vicuna_13b_stage1": (
        "root:10 0:10 1:7 2:4 3:2 4:2 5:1 6:1 7:1 8:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:1"
    ),
    "vicuna_13b_stage2": (
        "root:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 "
        "002:1 010:1 100:1"
    ),
    "vicuna_33b_stage1": ("root:10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1"),
    "vicuna_33b_stage2": (
        "root:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 001:1 010:1"
    ),
    "zephyr_stage2": (
        "root:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1"
    ),
}
"""Name -> numbers of children."""


def published_tree(name: str) -> tuple[Path, ...]:
    """The nodes of a published tree.

    Raises:
        KeyError: there is none of this name.
    """
    return tree_from_counts(_counts(PUBLISHED[name]))
