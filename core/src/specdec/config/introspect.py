"""What the configuration classes say about themselves: field docstrings, types and paths."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import attrs

from specdec.config.problems import join


@attrs.frozen
class Leaf:
    """One setting that has a value of its own (not a table of settings)."""

    path: str
    attribute: attrs.Attribute[Any]
    annotation: Any
    """The field's type, resolved."""
    doc: str
    """The field's docstring, on one line."""


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of a class's fields, inherited ones too: the string literal after each annotated name in the source.

    Returns an empty string for a field without one; nothing at all when the source is not available.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_field_docs(base)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    if cls.__module__ == "builtins":
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            docs[statement.target.id] = _string(following)
    return docs


def _string(statement: ast.stmt) -> str:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
        return ""
    value = statement.value.value
    return " ".join(value.split()) if isinstance(value, str) else ""


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Resolved types of a class's fields."""
    return typing.get_type_hints(cls, include_extras=True)


def unwrap_optional(annotation: Any) -> tuple[Any, bool]:
    """``X | None`` -> (X, True); anything else -> (itself, False)."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    inner = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    optional = len(inner) < len(typing.get_args(annotation))
    return (inner[0] if len(inner) == 1 else typing.Union[tuple(inner)]), optional  # noqa: UP007 - built at run time


@cache
def _leaves(cls: type, section: str) -> tuple[Leaf, ...]:
    return tuple(_walk(cls, section))


def leaves(cls: type, section: str = "") -> tuple[Leaf, ...]:
    """Every setting of a configuration class, tables of settings included, in the order of the fields.

    Fields named ``options`` are left out: their keys are unknown to the class.
    """
    return _leaves(cls, section)


def _walk(cls: type, section: str) -> Iterator[Leaf]:
    for attribute in attrs.fields(cls):
        annotation = field_types(cls)[attribute.name]
        inner, _ = unwrap_optional(annotation)
        if attrs.has(inner):
            yield from _walk(inner, join(section, attribute.name))
        elif attribute.name != "options":
            doc = field_docs(cls).get(attribute.name, "")
            yield Leaf(join(section, attribute.name), attribute, annotation, doc)


def is_secret(attribute: attrs.Attribute[Any]) -> bool:
    """Whether a field's value must not be shown; its metadata say so (``{"secret": True}``)."""
    return bool(attribute.metadata.get("secret"))
