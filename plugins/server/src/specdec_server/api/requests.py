"""The bodies that clients send. A field that is not here is refused, so that nothing is silently without effect."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

T = TypeVar("T")
_AT_ONCE: Any = Field(fail_fast=True)
Items = Annotated[list[T], _AT_ONCE]
"""A list in which the first wrong item is told: one error for each of millions would take minutes to collect."""


def _first_wrong(table: Any) -> Any:
    """Of a table of numbers with wrong values the first of those alone, for the same reason."""
    if not isinstance(table, dict):
        return table
    wrong = next((key for key, value in table.items() if type(value) not in (int, float)), None)
    return table if wrong is None else {wrong: table[wrong]}


Numbers = Annotated[dict[str, float], BeforeValidator(_first_wrong)]


class Strict(BaseModel):
    """No coercion: "7" is no number. No unknown fields, except with null, which asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """The fields that are given, and of unknown ones the first."""
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        known = _names(cls)
        unknown = [key for key in given if key not in known]
        return {key: value for key, value in given.items() if key in known or key == unknown[0]} if unknown else given


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """The names under which a model's fields come."""
    names = set()
    for name, field in model.model_fields.items():
        names.add(field.alias or name)
        if isinstance(field.validation_alias, AliasChoices):
            names.update(str(choice) for choice in field.validation_alias.choices)
    return frozenset(names)


class StreamOptions(Strict):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has the token counts."""
    continuous_usage_stats: bool | None = None
    """Token counts in every chunk."""
    include_obfuscation: Literal[False] | None = None
    """OpenAI's padding of chunks; there is none here."""


class JSONSchema(Strict):
    """The schema of ``response_format``."""

    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None

    # vLLM's structural tags: one of both forms
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None


class Accepted(Strict):
    """Fields that every kind of request takes; all but ``request_id`` have no effect here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    include_reasoning: Literal[True] | None = None
    """vLLM's: thoughts are part of the answer's text, and cannot be left out of it."""
    request_id: str | None = None
    """vLLM's: the part behind the prefix of the answer's id; the header X-Request-Id comes before it."""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TokenFields(Accepted):
    """How tokens are chosen, and where the text ends; None takes the default of `SamplingParams`."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Items[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # vLLM's extras
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = Field(default=None, validation_alias=AliasChoices("extra_args", "vllm_xargs"))
    """Arguments of logits processors."""
    priority: int | None = None

    # specdec's
    speculation: bool | str | dict[str, Any] | None = None
    """How this request is speculated for; false or "off" decodes it plainly."""


class SamplingFields(TokenFields):
    """What the answers of the two completion APIs hold."""

    n: int | None = None
    response_format: ResponseFormat | None = None

    # vLLM's extras
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    """Begin the prompt with the tokens that the tokenizer adds by itself: by default text is, a conversation is not,
    since its template writes them."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Keep this many tokens of a longer prompt; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are dropped: left keeps the end of the prompt, right its beginning."""
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None
    """Beam search's, which there is not: without effect."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens ``token_id:N``, so that they can be told apart."""
    return_token_ids: bool | None = None
    """Add the token ids of the prompt and of each choice."""

    # specdec's
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

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatCompletionRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Items[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """A value for the chat template; refused where it has no place for it."""
    modalities: Items[Literal["text"]] | None = None
    echo: bool | None = None
    """Begin the answer with the last message of the conversation, if that is the assistant's."""
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
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """``reasoning`` of the responses API."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Of thoughts that are told apart from the answer, which they are not here."""


LOGPROBS = "message.output_text.logprobs"
"""In ``include`` of the responses API; what else can be there is about tools and reasoning that there are not."""

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(TokenFields):
    """``POST /v1/responses``."""

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Items[Include] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Of tools that the server runs itself, of which there are none."""
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Items[int]
    skip_special_tokens: bool | None = None
