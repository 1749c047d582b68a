"""Opening engines for commands: the one place where the command line meets the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.async_llm import AsyncLLM
    from specdec.config import EngineConfig
    from specdec.llm import LLM


def check(config: EngineConfig) -> None:
    """Refuse what an engine would refuse before it reads weights."""
    from specdec.engine.build import check

    check(config)


def open_llm(config: EngineConfig) -> LLM:
    """An engine that waits for its results."""
    from specdec import LLM
    from specdec.target.importing import forgo_distributed

    forgo_distributed()
    return LLM.from_config(config)


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """An engine that streams."""
    from specdec import AsyncLLM
    from specdec.target.importing import forgo_distributed

    forgo_distributed()
    return AsyncLLM.from_config(config)


def chat_token_ids(engine: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """A conversation as token ids, through the model's chat template.

    Raises:
        InvalidRequestError: the model has none, or the messages do not fit it.
    """
    from specdec.target.tokenizer import apply_chat_template

    ids: list[int] = apply_chat_template(engine.get_tokenizer(), messages, model=engine.config.model)
    return ids
