"""Options of the method `suffix`: vLLM's names and defaults, and those of the store of past responses."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config.validators import boolean, integer, number, text

MAX_DEPTH = 512
"""Work and memory per token grow with ``suffix_decoding_max_tree_depth``, so there is an end to it."""
MAX_STORED_TOKENS = 1 << 28
"""Node numbers have 31 bits, and a token has up to two nodes."""


@frozen(kw_only=True)
class SuffixConfig:
    """How drafts are chosen, and what is kept of past responses."""

    SECTION: ClassVar[str] = "speculative"

    suffix_decoding_max_tree_depth: int = field(default=24, validator=integer(1, MAX_DEPTH))
    """Longest pattern that is counted, match and draft together; a longer draft follows the latest occurrence."""
    suffix_decoding_max_cached_requests: int = field(default=10_000, validator=integer(0))
    """Most past responses that are kept; 0 keeps none. The oldest leave first."""
    suffix_decoding_max_spec_factor: float = field(default=1.0, validator=number(0))
    """A match of n tokens is followed by at most this many times n draft tokens."""
    suffix_decoding_min_token_prob: float = field(default=0.1, validator=number(0, 1))
    """A draft ends before the token whose estimated probability, with those before it, is below this."""
    suffix_max_cached_tokens: int = field(default=1_000_000, validator=integer(0, MAX_STORED_TOKENS))
    """Most tokens that are kept of past responses, one more for each response; 0 keeps none. The oldest leave first."""
    suffix_stored_prompt_tokens: int = field(default=16, validator=integer(0, 4096))
    """So many of a prompt's last tokens are kept with its response, so that its beginning can be proposed."""
    suffix_share_unscoped: bool = field(default=True, validator=boolean())
    """Requests that name no suffix_scope share one store; when false, they are not stored and see no other's."""
    suffix_cache_path: str | None = field(default=None, validator=optional(text()))
    """File that keeps the past responses between runs; none when not set."""
    suffix_save_interval: float = field(default=300.0, validator=number(0))
    """Seconds after which new responses are saved while the engine runs; 0 saves only when it is closed."""
    suffix_trees: bool = field(default=False, validator=boolean())
    """Propose trees of several continuations instead of the most frequent one."""
