"""From a request's body to `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.sampling.params import SamplingParams
from specdec_server.http.errors import invalid

if TYPE_CHECKING:
    from specdec_server.api.requests import ResponseFormat, SamplingFields

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
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_logprobs: int,
    structured: dict[str, Any] | None = None,
) -> SamplingParams:
    """The parameters that a body asks for.

    Args:
        body: the request.
        max_tokens: None for as many as the model length allows.
        logprobs: alternatives per output token; None for no log-probabilities.
        max_logprobs: the server's limit on these.
        structured: a constraint that follows from something else than the body's own fields.

    Raises:
        APIError: two constraints at once, or too many alternatives.
        InvalidRequestError: a value is not allowed.
    """
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and not 0 <= value <= max_logprobs:
            raise invalid(f"{name} is {value}; this server gives 0 to {max_logprobs} (server.max_logprobs)", name)
    if structured is not None and body.structured_outputs is not None:
        raise invalid("structured_outputs and tool_choice both constrain the answer: send one", "structured_outputs")
    own = structured_outputs(body)  # a response_format is about answers that are no calls
    constraint = structured or own
    if constraint is not None:
        given["structured_outputs"] = constraint
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def structured_outputs(body: SamplingFields) -> dict[str, Any] | None:
    """The constraint of ``structured_outputs`` or ``response_format``; None when there is none."""
    constraint = None if body.response_format is None else _from_format(body.response_format)
    if body.structured_outputs is not None:
        if constraint is not None:
            raise invalid(
                "response_format and structured_outputs both constrain the answer: send one", "response_format"
            )
        return body.structured_outputs
    return constraint


def _from_format(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return {"json": wanted.json_schema.schema_}
