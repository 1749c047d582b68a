"""The processor's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, min_len, optional


@frozen(kw_only=True)
class ThinkingBudgetConfig:
    """Keys of ``logits_processor_options.thinking_budget``."""

    start: str = field(default="<think>", validator=[instance_of(str), min_len(1)])
    """The text that begins the thinking; the tokenizer turns it into tokens."""
    end: str = field(default="</think>", validator=[instance_of(str), min_len(1)])
    """The text that ends it, and that is forced when the budget is used up."""
    budget: int | None = field(default=None, validator=optional([instance_of(int), ge(0)]))
    """Thinking tokens of requests that bring no thinking_budget of their own; None: no limit for them."""
