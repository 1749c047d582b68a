"""What is not enforced is refused by its path; what is enforced is not."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_grammar_xgrammar.schema import check_schema

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, r"\$\.not"),
    ({"properties": {"a": {"contains": {}}}}, r"\$\.properties\.a\.contains"),
    ({"items": {"if": {}, "then": {}}}, r"\$\.items\.if; \$\.items\.then"),
    ({"type": "array", "uniqueItems": True}, r"\$\.uniqueItems"),
    ({"dependentRequired": {"a": ["b"]}}, r"\$\.dependentRequired"),
    ({"$defs": {"x": {"dependencies": {}}}}, r"\$\.\$defs\.x\.dependencies"),
    ({"$ref": "other.json"}, r"\$\.\$ref to another document, 'other.json'"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {}}, r"\$\.minimum beside \$ref"),
    ({"anyOf": [{"required": []}], "properties": {}}, r"\$\.properties beside anyOf"),
    ({"anyOf": [{}], "oneOf": [{}]}, r"\$\.oneOf beside anyOf"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, r"\$\.allOf with several schemas"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, r"\$\.maxLength beside pattern"),
    ({"type": "string", "format": "date", "minLength": 3}, r"\$\.minLength beside format"),
    ({"enum": ["a", "bb"], "maxLength": 1}, r"\$\.maxLength beside enum"),
    ({"enum": ["a", 3], "type": "string"}, r"\$\.type beside an enum with values of other types"),
    ({"enum": [True], "type": "integer"}, r"\$\.type beside an enum"),
    ({"const": 3, "type": "string"}, r"\$\.type beside a const"),
    ({"exclusiveMinimum": True, "minimum": 3}, r"\$\.exclusiveMinimum as a boolean"),
    ({"items": [{"type": "integer"}]}, r"\$\.items as a list"),
    ({"properties": {"a": {}}, "required": ["a", "zz"]}, r"\$\.required of 'zz', which properties does not name"),
]

TAKEN: list[Any] = [
    True,
    {},
    {"title": "t", "description": "d", "default": 3, "examples": [3], "type": "integer", "minimum": 3, "maximum": 9},
    {
        "type": "array",
        "items": {"$ref": "#/$defs/x"},
        "minItems": 1,
        "uniqueItems": False,
        "$defs": {"x": {"enum": [1, 2]}},
    },
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "object", "oneOf": [{"properties": {"a": {}}, "required": ["a"]}]},
    {"type": ["integer", "null"], "multipleOf": 3},
    {"enum": ["a", None], "type": ["string", "null"]},
    {"properties": {"not": {"type": "string"}, "if": {"type": "string"}}, "required": ["not"]},
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^XGrammar does not enforce {message}"):
        check_schema(schema, strict=True)


@pytest.mark.parametrize("schema", TAKEN)
def test_taken(schema: Any) -> None:
    check_schema(schema, strict=True)
