"""The hooks of the logits processor ``thinking_budget``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl
from specdec_thinking_budget.config import ThinkingBudgetConfig

if TYPE_CHECKING:
    from specdec.sampling.processor import LogitsProcessor
    from specdec.types import EngineContext


@hookimpl
def config_class() -> type:
    """The options that stand in ``logits_processor_options.thinking_budget``."""
    return ThinkingBudgetConfig


@hookimpl
def logits_processor(config: ThinkingBudgetConfig, engine: EngineContext) -> LogitsProcessor:
    """Build the processor for an engine."""
    from specdec_thinking_budget.processor import ThinkingBudget, tokens_of

    return ThinkingBudget(
        start=tokens_of(engine.tokenizer, "start", config.start),
        end=tokens_of(engine.tokenizer, "end", config.end),
        default=config.budget,
    )
