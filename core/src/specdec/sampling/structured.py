"""What the text of a request must look like: a JSON schema, a regular expression, a choice, a grammar.

`StructuredOutputsParams` is what a user passes, with vLLM's names; `GrammarSpec` is the same as one hashable value,
which a grammar backend compiles.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, fields, frozen

from specdec.errors import InvalidRequestError
from specdec.wording import shown

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

KINDS: tuple[GrammarKind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@frozen(kw_only=True)
class GrammarSpec:
    """One grammar, ready to be compiled and to be a cache key."""

    kind: GrammarKind
    text: str
    """By kind: a JSON schema; empty for ``json_object``; a regular expression; a JSON list of strings; a grammar in
    EBNF (GBNF, with the rule ``root``); a structural tag as JSON. JSON keeps the order of keys."""
    any_whitespace: bool = True
    """For ``json`` and ``json_object``: whether the whitespace between the parts is free."""

    def describe(self, longest: int = 60) -> str:
        """The grammar for a message: kind and beginning of the text."""
        if self.kind == "json_object":
            return "structured_outputs.json_object"
        text = self.text if len(self.text) <= longest else self.text[:longest] + "…"
        return f"structured_outputs.{self.kind} {text}"


def _as_tuple(value: Any) -> Any:
    """Converter: a list -> tuple; everything else is left for the checks."""
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class StructuredOutputsParams:
    """Constrains the output of a request; exactly one of the first six is given.

    The output is always the beginning of a text that the grammar allows, and a whole one when the request ends with
    finish reason "stop" without a stop string or stop token of the user's.

    Raises:
        InvalidRequestError: none or several are given, or a value has the wrong form.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as a dict or as text: the output is a JSON value that it describes."""
    json_object: bool | None = None
    """True: the output is any JSON object."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    choice: tuple[str, ...] | None = field(default=None, converter=_as_tuple)
    """The output is one of these strings."""
    grammar: str | None = None
    """The output follows this grammar: EBNF as in llama.cpp (GBNF), beginning with the rule ``root``."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts between tags, as JSON or dict, for backends that know it."""
    disable_any_whitespace: bool = False
    """Write JSON in one fixed form: on one line, with one space after commas and colons."""

    def __attrs_post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise _wrong("json_object", self.json_object, "true, or left out")
        given = [kind for kind in KINDS if getattr(self, kind) is not None and self._is_on(kind)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) if given else 'nothing that constrains the output'}; "
                f"give exactly one of {', '.join(KINDS)}."
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace", self.disable_any_whitespace, "True or False")
        self.spec()

    def _is_on(self, kind: str) -> bool:
        return kind != "json_object" or bool(self.json_object)

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """None, an instance, or a mapping of the fields (as JSON brings it) -> an instance.

        Raises:
            InvalidRequestError: an unknown key, or a value of the wrong form.
        """
        if value is None or isinstance(value, cls):
            return value
        known = [attribute.name for attribute in fields(cls)]
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"structured_outputs is {shown(value)}; it must be a StructuredOutputsParams or a mapping with one of "
                f"{', '.join(KINDS)}."
            )
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise InvalidRequestError(f"structured_outputs has no {unknown[0]!r}; it has {', '.join(known)}.")
        return cls(**value)

    def spec(self) -> GrammarSpec:
        """The one value that a grammar backend compiles.

        Raises:
            InvalidRequestError: the value has the wrong form.
        """
        if self.json is not None:
            return self._spec("json", _schema(self.json))
        if self.json_object:
            return self._spec("json_object", "")
        if self.choice is not None:
            return self._spec("choice", _choices(self.choice))
        if self.structural_tag is not None:
            return self._spec("structural_tag", _json_object("structural_tag", self.structural_tag))
        kind: GrammarKind = "regex" if self.regex is not None else "grammar"
        text = getattr(self, kind)
        if not isinstance(text, str) or not text:
            raise _wrong(kind, text, "a string that is not empty")
        return self._spec(kind, text)

    def _spec(self, kind: GrammarKind, text: str) -> GrammarSpec:
        return GrammarSpec(kind=kind, text=text, any_whitespace=not self.disable_any_whitespace)


def _wrong(name: str, value: object, right: str) -> InvalidRequestError:
    message = f"structured_outputs.{name} is {shown(value)}; it must be {right}."
    return InvalidRequestError(message, option="structured_outputs")


def _schema(value: Any) -> str:
    return "true" if value is True else _json_object("json", value, "a JSON schema: an object, or its text")


def _json_object(name: str, value: Any, right: str = "a JSON object, or its text") -> str:
    if isinstance(value, str):
        try:
            value = json_module.loads(value)
        except ValueError as error:
            raise InvalidRequestError(f"structured_outputs.{name} is not valid JSON: {error}.") from error
    if value is True and name == "json":
        return "true"
    if not isinstance(value, Mapping):
        raise _wrong(name, value, right)
    try:
        return json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"structured_outputs.{name} cannot be written as JSON: {error}.") from error


def _choices(value: Any) -> str:
    ok = isinstance(value, tuple) and value and all(isinstance(text, str) and text for text in value)
    if not ok:
        raise _wrong("choice", value, "a list of strings, none of them empty")
    return json_module.dumps(list(dict.fromkeys(value)), ensure_ascii=False)
