"""Options of the method `medusa`."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.drafting.token_trees import TREE_ALLOWED, ChainOptions, is_tree, parse_tree
from specdec_medusa.published import PUBLISHED, published_tree


def _tree(value: Any) -> Any:
    return published_tree(value) if isinstance(value, str) and value in PUBLISHED else parse_tree(value)


@frozen(kw_only=True)
class MedusaConfig(ChainOptions):
    """Which heads draft, and in what shape: chains of the heads' likeliest tokens, or a static tree."""

    model: str = field(validator=check.text())
    """The heads: a directory or a model id."""
    speculative_token_tree: Any = field(
        default=None,
        converter=_tree,
        validator=optional(check.Check(is_tree, f"one of {', '.join(PUBLISHED)}, or {TREE_ALLOWED}", tuple(PUBLISHED))),
    )
    """A static tree: a string like "[(0,), (1,), (0, 0)]", lists, or the name of one of the authors' trees."""
