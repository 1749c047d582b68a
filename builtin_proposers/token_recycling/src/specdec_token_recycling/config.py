"""Options of the method `token_recycling`."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.drafting.token_trees import TREE_ALLOWED, Path, is_tree, parse_tree


@frozen(kw_only=True)
class TokenRecyclingConfig:
    """The shape of the drafts: chains of ``num_speculative_tokens``, or a static tree."""

    SECTION: ClassVar[str] = "speculative"

    speculative_token_tree: Any = field(
        default=None, converter=parse_tree, validator=optional(check.Check(is_tree, TREE_ALLOWED))
    )
    """A static tree, as the paths of its nodes: a string like "[(0,), (1,), (0, 0)]" or lists. The numbers are ranks
    among the tokens that the target found likeliest behind a token; so many of them are kept for each."""

    def paths(self, num_speculative_tokens: int) -> tuple[Path, ...]:
        """The nodes of every draft, which for a chain are the likeliest token behind the one before."""
        tree: tuple[Path, ...] | None = self.speculative_token_tree
        return tree or tuple([(0,) * depth for depth in range(1, num_speculative_tokens + 1)])
