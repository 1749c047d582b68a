"""The bodies that clients send. A field that is not here is refused, so that nothing is silently without effect."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """No coercion: "7" is no number. No unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has the token counts."""
    continuous_usage_stats: bool | None = None
    """Token counts in every chunk."""


class JSONSchema(Strict):
    """The schema of ``response_format``."""

    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class Accepted(Strict):
    """Fields of OpenAI's API that are taken and have no effect here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class SamplingFields(Accepted):
    """How tokens are chosen, and what the answer holds; None takes the default of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    """Arguments of logits processors."""
    priority: int | None = None
    return_token_ids: bool | None = None
    """Add the token ids of the prompt and of each choice."""

    # specdec's
    speculation: bool | str | dict[str, Any] | None = None
    """How this request is speculated for; false or "off" decodes it plainly."""
    return_spec_stats: bool | None = None
    """Add the request's drafted and accepted tokens."""
    return_token_origins: bool | None = None
    """Add for each token the draft position it was accepted from; where the model chose it itself -1 (no draft), -2
    (recovered) or -3 (bonus)."""
    return_token_bytes: bool | None = None
    """Add the bytes that each token adds to the text, as numbers; a character may be spread over several tokens, and a
    special token that the text leaves out has none."""


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatCompletionRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextFormat(Strict):
    """``text.format`` of the responses API."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """``text`` of the responses API."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Accepted):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    priority: int | None = None
    speculation: bool | str | dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None
