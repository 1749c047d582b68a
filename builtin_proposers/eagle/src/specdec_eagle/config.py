"""Options of the methods `eagle` and `eagle3`, with vLLM's names where it has them."""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.errors import ConfigError
from specdec.types import DRAFT_SAMPLE_METHODS

MAX_WIDTH, MAX_DEPTH = 32, 32

Path = tuple[int, ...]


def parse_tree(value: Any) -> Any:
    """A static tree from vLLM's notation, a string like "[(0,), (1,), (0, 0)]", or from lists of lists."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    if isinstance(value, list | tuple):
        return tuple(tuple(path) if isinstance(path, list | tuple) else path for path in value)
    return value


def _is_tree(value: Any) -> bool:
    """Whether all prefixes of all paths are there, no path twice, and siblings are numbered from 0 without gaps."""
    if not isinstance(value, tuple) or not value or not all(isinstance(path, tuple) and path for path in value):
        return False
    if not all(type(rank) is int and 0 <= rank < MAX_WIDTH for path in value for rank in path):
        return False
    paths = set(value)
    complete = all((not path[:-1] or path[:-1] in paths) for path in paths)
    return (
        complete
        and len(paths) == len(value)
        and max(map(len, paths)) <= MAX_DEPTH
        and all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in paths)
    )


@frozen(kw_only=True)
class EagleConfig:
    """Which head drafts, and in what shape.

    Without a tree option drafts are chains of ``num_speculative_tokens``. ``speculative_token_tree`` makes every draft
    the same tree; ``tree_top_k`` lets each draft grow where the head is sure (EAGLE-2, Li et al. 2024), up to
    ``num_speculative_tokens`` nodes.
    """

    SECTION: ClassVar[str] = "speculative"

    model: str = field(validator=check.text())
    """The head: a directory or a model id."""
    draft_sample_method: str = field(default="greedy", validator=check.choice(*DRAFT_SAMPLE_METHODS))
    """How draft tokens are picked at temperature above 0: the likeliest ("greedy"), drawn from the head's law
    ("probabilistic", for verifiers that use draft probabilities), or drawn with the target's own noise ("coupled", for
    the verifier match)."""
    confidence_threshold: float = field(default=0.0, validator=check.number(0, 1))
    """A chain ends before the first token whose law has no probability this large; 0 never ends it."""
    speculative_token_tree: Any = field(
        default=None,
        converter=parse_tree,
        validator=optional(
            check.Check(
                _is_tree,
                'a tree like "[(0,), (1,), (0, 0)]": each path names the ranks of its tokens from the root, all its '
                "beginnings are listed too, and siblings are numbered from 0",
            )
        ),
    )
    """A static tree, as the paths of its nodes: a string like "[(0,), (1,), (0, 0)]" or lists."""
    tree_top_k: int | None = field(default=None, validator=optional(check.integer(1, MAX_WIDTH)))
    """Dynamic tree: children considered per node, and nodes of a level that are expanded."""
    tree_depth: int = field(default=5, validator=check.integer(1, MAX_DEPTH))
    """Dynamic tree: levels."""
    head_config: dict[str, Any] = field(factory=dict, converter=check.as_dict, validator=check.table())
    """Keys of the head's configuration that shall be otherwise, for heads whose config.json says too little or wrong
    things, for example ``eagle_aux_hidden_state_layer_ids``."""

    def __attrs_post_init__(self) -> None:
        if self.speculative_token_tree is not None and self.tree_top_k is not None:
            raise ConfigError(
                "speculative.speculative_token_tree is a static tree and speculative.tree_top_k asks for dynamic ones: "
                "give one of them",
                path="speculative.tree_top_k",
            )
        if self.has_trees and (self.draft_sample_method != "greedy" or self.confidence_threshold):
            raise ConfigError(
                f"speculative.draft_sample_method is {self.draft_sample_method!r} and confidence_threshold "
                f"{self.confidence_threshold:g}, but trees hold the likeliest tokens: leave both out, or draft chains",
                path="speculative.draft_sample_method",
            )

    @property
    def static_tree(self) -> tuple[Path, ...] | None:
        """The paths of the static tree's nodes."""
        paths: tuple[Path, ...] | None = self.speculative_token_tree
        return paths

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.speculative_token_tree is not None or self.tree_top_k is not None
