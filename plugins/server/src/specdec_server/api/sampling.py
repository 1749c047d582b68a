"""From a request's body to `SamplingParams`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from specdec.config import parse_size
from specdec_server.api.service import Cut
from specdec_server.http.errors import invalid

if TYPE_CHECKING:
    from specdec.sampling.params import SamplingParams
    from specdec_server.api.requests import ResponseFormat, SamplingFields, TokenFields
    from specdec_server.config import ServerConfig

PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "extra_args",
)
"""Fields that `SamplingParams` has under the same name."""


def sampling_params(
    body: TokenFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: SamplingParams,
    limits: ServerConfig,
    wanted: ResponseFormat | None,
    structured: dict[str, Any] | None = None,
) -> SamplingParams:
    """The parameters that a body asks for.

    Args:
        body: the request.
        max_tokens: None for as many as the model length allows.
        logprobs: alternatives per output token; None for no log-probabilities.
        defaults: the model's, for what the request leaves open.
        limits: the server's.
        wanted: what the answer must look like, in OpenAI's words.
        structured: a constraint that follows from something else than the body's own fields.

    Raises:
        APIError: two constraints at once, or more of something than the server allows.
        InvalidRequestError: a value is not allowed.
    """
    given = {name: value for name in PASSED_ON if (value := getattr(body, name, None)) is not None}
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", given.get("prompt_logprobs"))):
        if value is not None and not 0 <= value <= limits.max_logprobs:
            most = f"0 to {limits.max_logprobs} (server.max_logprobs)"
            raise invalid(f"{name} is {value}; this server gives {most}", name)
    for name in ("stop", "bad_words"):
        strings = given.get(name, ())
        strings = (strings,) if isinstance(strings, str) else strings
        if len(strings) > limits.max_strings:
            most = f"at most {limits.max_strings} (server.max_strings)"
            raise invalid(f"{name} has {len(strings)} strings; this server takes {most}", name)
        if (size := sum(map(len, strings))) > limits.max_string_characters:
            most = f"at most {limits.max_string_characters} (server.max_string_characters)"
            raise invalid(f"{name} has {size} characters; this server takes {most}", name)
    if structured is not None and body.structured_outputs is not None:
        raise invalid("structured_outputs and tool_choice both constrain the answer: send one", "structured_outputs")
    own = structured_outputs(body, wanted)  # a response_format is about answers that are no calls
    constraint = structured or own
    if constraint is not None:
        _check_size(constraint, limits)
        given["structured_outputs"] = constraint
    return attrs.evolve(defaults, max_tokens=max_tokens, logprobs=logprobs, **given)


def _check_size(constraint: dict[str, Any], limits: ServerConfig) -> None:
    """Refuse what would compile for minutes: that cannot be stopped, and may take more than proportional time."""
    try:
        size = len(json.dumps(constraint, ensure_ascii=False))
    except RecursionError as error:
        raise invalid("what constrains the answer is nested too deeply") from error
    if size > parse_size(limits.max_grammar_size):
        most = f"at most {parse_size(limits.max_grammar_size)} (server.max_grammar_size)"
        raise invalid(f"what constrains the answer has {size} characters; this server takes {most}")


def prompt_cut(body: SamplingFields, params: SamplingParams) -> Cut | None:
    """Which tokens of a long prompt are kept; None when the client did not ask for that.

    Args:
        body: the request.
        params: what it asks for; -1 leaves room for so many tokens, or for one.
    """
    if body.truncate_prompt_tokens is None:
        if body.truncation_side is not None:
            raise invalid("truncation_side needs truncate_prompt_tokens", "truncation_side")
        return None
    return Cut(body.truncate_prompt_tokens, body.truncation_side or "left", params.max_tokens or 1)


def structured_outputs(body: TokenFields, wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """The constraint of ``structured_outputs`` or ``response_format``; None when there is none."""
    constraint = None if wanted is None else _from_format(wanted)
    if body.structured_outputs is not None:
        if constraint is not None:
            raise invalid(
                "response_format and structured_outputs both constrain the answer: send one", "response_format"
            )
        return {key: value for key, value in body.structured_outputs.items() if value is not _UNSET.get(key)}
    return constraint


_UNSET: dict[str, Any] = {"disable_additional_properties": False}
"""vLLM's keys that do not exist here -> the value with which they ask for nothing; null asks for nothing everywhere."""


def _from_format(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        return {"structural_tag": wanted.model_dump(exclude_none=True)}
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": wanted.json_schema.schema_}
