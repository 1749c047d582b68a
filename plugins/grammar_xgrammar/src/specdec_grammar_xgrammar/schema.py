"""Finds what XGrammar would leave out of account in a JSON schema, so that it is refused instead.

XGrammar 0.2 compiles some schemas to a grammar that also allows what they forbid. An output that is promised to fit the
schema must not come from one of these. One thing is let through: ``oneOf`` is read as ``anyOf``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_UNKNOWN = (
    "additionalItems",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that have no effect."""

_ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "id",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that forbid nothing."""

_VALIDATING = frozenset(
    {
        "additionalProperties",
        "enum",
        "const",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "maxProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)

_OF_ONE_SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions")

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def check_schema(schema: Any, *, strict: bool) -> None:
    """Refuse a schema that would not be enforced in full.

    Args:
        schema: the schema as plain values.
        strict: whether objects have only the properties that are named.

    Raises:
        ValueError: with every part that is not enforced, by its path.
    """
    problems = list(_problems(schema, "$", strict))
    if problems:
        raise ValueError("XGrammar does not enforce " + "; ".join(problems))


def _problems(schema: Any, path: str, strict: bool) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    yield from _keywords(schema, path)
    yield from _combinations(schema, path)
    yield from _required(schema, path, strict)
    for key in _OF_ONE_SCHEMA:
        yield from _problems(schema.get(key), f"{path}.{key}", strict)
    for key in _OF_MANY:
        if isinstance(schema.get(key), list):
            for index, inner in enumerate(schema[key]):
                yield from _problems(inner, f"{path}.{key}[{index}]", strict)
    for key in _OF_NAMED:
        if isinstance(schema.get(key), dict):
            for name, inner in schema[key].items():
                yield from _problems(inner, f"{path}.{key}.{name}", strict)


def _keywords(schema: dict[str, Any], path: str) -> Iterator[str]:
    for key in _UNKNOWN:
        if key in schema:
            yield f"{path}.{key}"
    if schema.get("uniqueItems"):
        yield f"{path}.uniqueItems"
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(key), bool):
            yield f"{path}.{key} as a boolean (a number in present JSON Schema)"
    if isinstance(schema.get("items"), list):
        yield f"{path}.items as a list (prefixItems in present JSON Schema)"
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        yield f"{path}.$ref to another document, {reference!r}"


def _combinations(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Keywords of which only one counts where they stand side by side."""
    beside = sorted(_VALIDATING & set(schema))
    for key in ("$ref", "anyOf", "oneOf", "allOf"):
        others = [name for name in beside if not (name == "type" and key != "$ref" and len(beside) == 1)]
        if key in schema and others:
            yield f"{path}.{others[0]} beside {key}"
    combined = [key for key in ("$ref", "anyOf", "oneOf", "allOf") if key in schema]
    if len(combined) > 1:
        yield f"{path}.{combined[1]} beside {combined[0]}"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield f"{path}.allOf with several schemas"
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    for key in ("pattern", "format"):
        if key in schema and lengths:
            yield f"{path}.{lengths[0]} beside {key}"
    if "pattern" in schema and "format" in schema:
        yield f"{path}.format beside pattern"
    for key in ("enum", "const"):
        others = [name for name in beside if name not in (key, "type")]
        if key in schema and others:
            yield f"{path}.{others[0]} beside {key}"
    if "enum" in schema and "type" in schema and not _fit(schema["enum"], schema["type"]):
        yield f"{path}.type beside an enum with values of other types"
    if "const" in schema and "type" in schema and not _fit([schema["const"]], schema["type"]):
        yield f"{path}.type beside a const of another type"


def _fit(values: Any, kind: Any) -> bool:
    """Whether all values are of the type, or of one of the types."""
    kinds = kind if isinstance(kind, list) else [kind]
    allowed = tuple(python for name in kinds for python in _TYPES.get(str(name), (object,)))
    for value in values if isinstance(values, list) else []:
        if isinstance(value, bool) and "boolean" not in kinds:
            return False
        if not isinstance(value, allowed):
            return False
    return True


def _required(schema: dict[str, Any], path: str, strict: bool) -> Iterator[str]:
    named = schema.get("properties")
    required = schema.get("required")
    if not isinstance(required, list) or not required:
        return
    missing = [name for name in required if not isinstance(named, dict) or name not in named]
    if missing:
        yield f"{path}.required of {missing[0]!r}, which properties does not name"
