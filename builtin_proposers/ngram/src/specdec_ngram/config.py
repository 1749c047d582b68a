"""Options of the method `ngram`, with vLLM's names and defaults."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config.validators import integer
from specdec.errors import ConfigError

DEFAULT_LENGTH = 5
"""Both lengths when neither is given."""
MAX_LENGTH = 1024
"""The work per new token is at most proportional to ``prompt_lookup_max``, so there is an end to it."""


@frozen(kw_only=True)
class NgramConfig:
    """How long the matched n-gram may be.

    If only one of the two lengths is given, the other equals it; if none is, both are 5.
    """

    SECTION: ClassVar[str] = "speculative"

    prompt_lookup_max: int | None = field(default=None, validator=optional(integer(1, MAX_LENGTH)))
    """Longest suffix of the tokens so far that is looked up; the same as the minimum when not set, or 5."""
    prompt_lookup_min: int | None = field(default=None, validator=optional(integer(1, MAX_LENGTH)))
    """Shortest suffix that counts as a match; the same as the maximum when not set, or 5."""

    def __attrs_post_init__(self) -> None:
        if self.min_length > self.max_length:
            raise ConfigError(
                f"speculative.prompt_lookup_min is {self.min_length} and speculative.prompt_lookup_max is "
                f"{self.max_length}: the minimum must not exceed the maximum.",
                path="speculative.prompt_lookup_min",
            )

    @property
    def min_length(self) -> int:
        """The shortest match in effect."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LENGTH

    @property
    def max_length(self) -> int:
        """The longest match in effect."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LENGTH
