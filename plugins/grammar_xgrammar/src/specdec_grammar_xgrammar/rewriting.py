"""Writes a JSON schema in a form that XGrammar enforces in full, where a simple one exists.

The new schema describes no value that the old one does not.
"""

from __future__ import annotations

import re
from typing import Any

_LITERALS = re.compile(r"\^\(?([^\\^$.*+?()\[\]{}]+)\)?\$")
"""A pattern that is a list of literal texts."""

_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "type"})


def rewritten(schema: Any, *, strict: bool) -> Any:
    """The schema, rewritten at every level.

    Args:
        schema: plain values; not changed.
        strict: whether objects have only the properties that are named.
    """
    if isinstance(schema, list):
        return [rewritten(inner, strict=strict) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _inner(key, value, strict) for key, value in schema.items()}
    return _alternatives_of_required(_open_arrays(_listed_texts(schema)), strict)


def _inner(key: str, value: Any, strict: bool) -> Any:
    """The value of a keyword with the schemas in it rewritten."""
    if key in ("enum", "const", "default", "examples", "required"):
        return value
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {name: rewritten(inner, strict=strict) for name, inner in value.items()}
    return rewritten(value, strict=strict)


def _listed_texts(schema: dict[str, Any]) -> dict[str, Any]:
    """``pattern`` with a length beside it, when the pattern lists texts: an enum of those that are not too long."""
    found = _LITERALS.fullmatch(schema["pattern"]) if isinstance(schema.get("pattern"), str) else None
    if found is None or not {"minLength", "maxLength"} & set(schema) or schema.get("type") != "string":
        return schema
    low, high = schema.get("minLength", 0), schema.get("maxLength", float("inf"))
    texts = [text for text in found[1].split("|") if low <= len(text) <= high]
    kept = {key: value for key, value in schema.items() if key not in ("pattern", "minLength", "maxLength")}
    return {**kept, "enum": texts}


def _open_arrays(schema: dict[str, Any]) -> dict[str, Any]:
    """Arrays whose number of items is given, and nothing else: of any items, which strict grammars would not allow."""
    counted = {"minItems", "maxItems"} & set(schema)
    described = {"items", "prefixItems", "unevaluatedItems"} & set(schema)
    return {**schema, "items": {}} if counted and not described else schema


def _alternatives_of_required(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """``anyOf`` or ``oneOf`` that only says which properties are required: one object schema for each alternative.

    With ``oneOf`` no other alternative may hold, so each leaves out what the others ask for beyond it; that needs
    closed objects.
    """
    properties = schema.get("properties")
    name = next((key for key in ("anyOf", "oneOf") if key in schema), None)
    required = _required_alone(schema.get(name)) if name else None
    if name is None or required is None or not isinstance(properties, dict) or schema.get("type", "object") != "object":
        return schema
    if not all(set(names) <= set(properties) for names in required) or (
        name == "oneOf" and not _is_closed(schema, strict)
    ):
        return schema
    base = {key: schema[key] for key in _OF_OBJECTS if key in schema}
    rest = {key: value for key, value in schema.items() if key not in _OF_OBJECTS and key != name}
    branches = []
    for index, names in enumerate(required):
        absent: set[str] = set()
        if name == "oneOf":
            others = [set(other) - set(names) for place, other in enumerate(required) if place != index]
            if not all(others):
                return schema
            absent = set().union(*(set(sorted(other)[:1]) for other in others))
        needed = [*dict.fromkeys([*base.get("required", []), *names])]
        if absent & set(needed):
            continue
        kept = {key: value for key, value in properties.items() if key not in absent}
        branches.append({**base, "type": "object", "properties": kept, "required": needed})
    return {**rest, "anyOf": branches} if branches else schema


def _required_alone(branches: Any) -> list[list[str]] | None:
    """What each alternative requires, when that is all that each of them says."""
    if not isinstance(branches, list) or not all(isinstance(b, dict) and set(b) == {"required"} for b in branches):
        return None
    return [branch["required"] for branch in branches]


def _is_closed(schema: dict[str, Any], strict: bool) -> bool:
    return schema.get("additionalProperties") is False or ("additionalProperties" not in schema and strict)
