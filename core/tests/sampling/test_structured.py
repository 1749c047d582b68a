"""`StructuredOutputsParams`: one constraint, in the right form."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SamplingParams
from specdec.errors import InvalidRequestError
from specdec.sampling.structured import GrammarSpec, StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"b": 1, "a": "ü"}}, "json", '{"b": 1, "a": "ü"}'),
        ({"json": '{"b":1,  "a":2}'}, "json", '{"b": 1, "a": 2}'),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "[a-c]"}, "regex", "[a-c]"),
        ({"choice": ["b", "a", "b"]}, "choice", '["b", "a"]'),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"structural_tag": {"a": 1}}, "structural_tag", '{"a": 1}'),
        ({"json": {}, "json_object": False}, "json", "{}"),
    ],
)
def test_one_value_to_compile(given: dict[str, Any], kind: str, text: str) -> None:
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs == StructuredOutputsParams(**given)
    assert params.structured_outputs.spec() == GrammarSpec(kind=kind, text=text)  # type: ignore[arg-type]
    assert hash(params.structured_outputs.spec()) == hash(GrammarSpec(kind=kind, text=text))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "structured_outputs has nothing that constrains the output; give exactly one of json, json_object"),
        ({"regex": "a", "grammar": "b"}, "structured_outputs has regex and grammar; give exactly one"),
        ({"json_object": False}, "nothing that constrains"),
        ({"json_object": 3}, r"structured_outputs.json_object is 3; it must be true, or left out"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON"),
        ({"json": "[1]"}, "structured_outputs.json is .*must be a JSON schema: an object, or its text"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json cannot be written as JSON"),
        ({"regex": ""}, "structured_outputs.regex is ''; it must be a string that is not empty"),
        ({"regex": 3}, "structured_outputs.regex is 3"),
        ({"choice": []}, r"structured_outputs.choice is \[\]; it must be a list of strings, none of them empty"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"structural_tag": 3}, "structured_outputs.structural_tag is 3"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace is 1"),
        ({"jsn": {}}, "structured_outputs has no 'jsn'; it has json, json_object, regex"),
        ("regex", "structured_outputs is 'regex'; it must be a StructuredOutputsParams or a mapping"),
    ],
)
def test_mistakes(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize("given", [3, {1: 2}, "a"])
def test_extra_args(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args is .*; it must be a mapping with string keys"):
        SamplingParams(extra_args=given)
    assert SamplingParams(extra_args={"a": [1]}).extra_args == {"a": [1]}
