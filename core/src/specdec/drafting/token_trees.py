"""Options for the shape of drafts that model-based proposers share; imports nothing heavy.

A static tree is given by the paths of its nodes: (0,) is the likeliest token behind the text, (1,) the second
likeliest, (0, 1) the second likeliest behind the first, and so on.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.errors import ConfigError
from specdec.types import DEFAULT_DRAFT_SAMPLE_METHOD, DRAFT_SAMPLE_METHODS

MAX_WIDTH, MAX_DEPTH = 32, 32

Path = tuple[int, ...]

TREE_ALLOWED = (
    'a tree like "[(0,), (1,), (0, 0)]": each path names the ranks of its tokens from the root, all its beginnings are '
    "listed too, and siblings are numbered from 0"
)


def parse_tree(value: Any) -> Any:
    """A static tree as a tuple of tuples, from vLLM's notation (a string) or from lists; other values as they are."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    if isinstance(value, list | tuple):
        return tuple(tuple(path) if isinstance(path, list | tuple) else path for path in value)
    return value


def is_tree(value: Any) -> bool:
    """Whether all beginnings of all paths are there, no path twice, and siblings are numbered from 0 without gaps."""
    if not isinstance(value, tuple) or not value or not all(isinstance(path, tuple) and path for path in value):
        return False
    if not all(type(rank) is int and 0 <= rank < MAX_WIDTH for path in value for rank in path):
        return False
    paths = set(value)
    return (
        len(paths) == len(value)
        and max(map(len, paths)) <= MAX_DEPTH
        and all(not path[:-1] or path[:-1] in paths for path in paths)
        and all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)
    )


def in_order(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Nodes by depth, then by rank: any number of the first of them is a tree."""
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def tree_from_counts(counts: Mapping[str, int]) -> tuple[Path, ...]:
    """A tree from the number of children of its nodes.

    Args:
        counts: children by parent; a parent is named by its ranks as digits, the root by an empty string.
    """
    return in_order([(*map(int, parent), rank) for parent, count in counts.items() for rank in range(count)])


def check_size(paths: Sequence[Path], num_speculative_tokens: int) -> None:
    """Refuse a static tree that is larger than a draft may be.

    Raises:
        ConfigError: says what to set.
    """
    if len(paths) > num_speculative_tokens:
        raise ConfigError(
            f"speculative.speculative_token_tree has {len(paths)} nodes, more than speculative.num_speculative_tokens, "
            f"{num_speculative_tokens}: set that to {len(paths)}",
            path="speculative.num_speculative_tokens",
        )


@frozen(kw_only=True)
class ChainOptions:
    """How the tokens of a chain are picked."""

    SECTION: ClassVar[str] = "speculative"

    draft_sample_method: str = field(default=DEFAULT_DRAFT_SAMPLE_METHOD, validator=check.choice(*DRAFT_SAMPLE_METHODS))
    """How draft tokens are picked at temperature above 0: drawn with the target's own noise ("coupled", of which the
    verifier match keeps most), drawn from the draft's own law ("probabilistic", for verifiers that use draft
    probabilities), or the likeliest ("greedy"). In static trees the children of a node are drawn without replacement;
    the verifier rejection uses their probabilities with its ``tree_rule`` "recursive"."""
    confidence_threshold: float = field(default=0.0, validator=check.number(0, 1))
    """A chain ends before the first token whose law has no probability this large; 0 never ends it."""
    speculative_token_tree: Any = field(
        default=None, converter=parse_tree, validator=optional(check.Check(is_tree, TREE_ALLOWED))
    )
    """A static tree, as the paths of its nodes: a string like "[(0,), (1,), (0, 0)]" or lists. The numbers are ranks
    among the likeliest tokens, or of draws, by ``draft_sample_method``."""

    def __attrs_post_init__(self) -> None:
        if self.has_trees and self.confidence_threshold:
            raise ConfigError(
                f"speculative.confidence_threshold is {self.confidence_threshold:g}, but it is for chains and a tree "
                "is asked for: leave one of them out",
                path="speculative.confidence_threshold",
            )

    @property
    def static_tree(self) -> tuple[Path, ...] | None:
        """The paths of the static tree's nodes."""
        paths: tuple[Path, ...] | None = self.speculative_token_tree
        return paths

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.static_tree is not None


@frozen(kw_only=True)
class TreeOptions(ChainOptions):
    """How chains and trees grow: `ChainOptions`, and dynamic trees (EAGLE-2, Li et al. 2024).

    Without a tree option drafts are chains of ``num_speculative_tokens``. A static tree makes every draft the same
    tree; ``tree_top_k`` lets each grow where the draft is sure, up to ``num_speculative_tokens`` nodes.
    """

    tree_top_k: int | None = field(default=None, validator=optional(check.integer(1, MAX_WIDTH)))
    """Dynamic tree: children considered per node, and nodes of a level that are expanded. Its nodes are the likeliest,
    whether ``draft_sample_method`` is coupled or greedy."""
    tree_depth: int = field(default=5, validator=check.integer(1, MAX_DEPTH))
    """Dynamic tree: most levels."""

    def __attrs_post_init__(self) -> None:
        if self.static_tree is not None and self.tree_top_k is not None:
            raise ConfigError(
                "speculative.speculative_token_tree is a static tree and speculative.tree_top_k asks for dynamic ones: "
                "give one of them",
                path="speculative.tree_top_k",
            )
        if self.tree_top_k is not None and self.draft_sample_method == "probabilistic":
            raise ConfigError(
                "speculative.draft_sample_method is 'probabilistic', but the dynamic trees of "
                "speculative.tree_top_k keep the likeliest of all tokens, which then have no law of their own: leave "
                "it out, or give a static tree as speculative.speculative_token_tree",
                path="speculative.draft_sample_method",
            )
        ChainOptions.__attrs_post_init__(self)

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.static_tree is not None or self.tree_top_k is not None
