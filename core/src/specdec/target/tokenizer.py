"""The target's tokenizer, its end-of-sequence ids and its chat template."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from specdec.sampling.params import is_unicode
from specdec.target.gguf import CONVERSION_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
"""A checkpoint directory with none of these has no tokenizer."""


def load_tokenizer(
    path: Path, wanted: str | None = None, *, cache_dir: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a tokenizer.

    Args:
        path: the model's checkpoint directory.
        wanted: a directory or hub id to take the tokenizer from instead.
        cache_dir: specdec's cache directory.
        trust_remote_code: run Python files that come with it.

    Returns:
        A transformers tokenizer, or None when the checkpoint has none: such a model takes and gives token ids only.

    Raises:
        ModelNotFoundError: ``wanted`` is not there.
        ModelLoadError: tokenizer files exist but cannot be read.
    """
    from transformers import AutoTokenizer

    if wanted is not None:
        path = _directory(wanted, cache_dir, trust_remote_code)
    if not any(True for pattern in TOKENIZER_FILES for _ in path.glob(pattern)):
        if wanted is not None:
            raise ModelNotFoundError(f"{wanted!r} has no tokenizer files", option="tokenizer")
        _say_why_there_is_none(path)
        return None
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ModelLoadError(
            f"{path}: its tokenizer cannot be loaded: {type(error).__name__}: {lines[0]}. "
            "Set tokenizer to another directory, or remove the tokenizer's files to work with token ids alone"
        ) from error


def _directory(wanted: str, cache_dir: str | None, trust_remote_code: bool) -> Path:
    from specdec.target.resolve import resolve_model

    with suppress(OSError, RuntimeError):  # a name too long, or no such home directory: `resolve_model` says so
        path = Path(wanted).expanduser()
        if path.is_dir():
            return path
    found = resolve_model(wanted, cache_dir, trust_remote_code=trust_remote_code, option="tokenizer")
    if found.kind != "directory":
        raise ModelNotFoundError(
            f"{wanted!r} is a GGUF file; give a directory with tokenizer files, or a hub id", option="tokenizer"
        )
    return found.path


def _say_why_there_is_none(path: Path) -> None:
    problem = None
    if (path / CONVERSION_FILE).is_file():
        problem = json.loads((path / CONVERSION_FILE).read_text(encoding="utf-8")).get("tokenizer_problem")
    logger.warning(
        "%s has no tokenizer%s: prompts must be token ids, and outputs have no text",
        path,
        f" ({problem})" if problem else "",
    )


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """End-of-sequence ids of generation config, model config and tokenizer together, sorted.

    Args:
        sources: objects whose ``eos_token_id`` is an id, a list of ids, None or missing; None is passed over.
    """
    ids: set[int] = set()
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or ())
    return tuple(sorted(ids))


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    model: str,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, ending where the assistant's answer begins.

    Args:
        tokenizer: the target's tokenizer or None.
        messages: dicts with ``role`` and ``content``; ``content`` may be missing beside ``tool_calls``.
        model: as the user named it, for messages.
        tools: functions the model may call, as JSON schemas, for templates that show tools to the model.
        add_generation_prompt: end with what begins an answer of the assistant.
        continue_final_message: end inside the last message, which the model continues.
        add_special_tokens: let the tokenizer add its own, beside those that the template writes.
        variables: further values for the template; ``chat_template`` takes its place.

    Raises:
        InvalidRequestError: no tokenizer, no chat template, messages that do not fit it, or tools and a template
            without a place for them.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            f"chat: the model {model!r} has no tokenizer; set tokenizer, or use generate with token ids"
        )
    variables = dict(variables or {})
    if not (variables.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise InvalidRequestError(
            f"chat: the model {model!r} has no chat template (it may be a base model); use generate with a plain prompt"
        )
    if not messages:
        raise InvalidRequestError("chat: the conversation is empty")
    for number, message in enumerate(messages):
        has_content = isinstance(message, dict) and ("content" in message or "tool_calls" in message)
        if not has_content or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"chat: message {number} must be a dict with 'role' and 'content', got {message!r}"
            )
    if tools and not names_variable(tokenizer.get_chat_template(variables.get("chat_template"), tools), "tools"):
        raise InvalidRequestError(
            f"tools: the chat template of the model {model!r} has no place for tools, so the model would not learn of "
            "them; take a model or a chat_template that has, or send no tools (or tool_choice 'none')"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **variables,
        )
    except Exception as error:  # templates are programs that come with models
        raise InvalidRequestError(f"chat: the messages do not fit the chat template of {model!r}: {error}") from error
    if not is_unicode(text):
        raise InvalidRequestError("chat: the messages are no valid Unicode: they have lone surrogates")
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def names_variable(template: str, name: str) -> bool:
    """Whether a Jinja template names a variable outside its comments."""
    return re.search(rf"\b{name}\b", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)) is not None
