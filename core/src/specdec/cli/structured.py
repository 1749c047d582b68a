"""Options for structured output: ``--json-schema``, ``--regex``, ``--choice``, ``--grammar``, ``--json-object``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

_COLLECTED = "structured_settings"


def add_structured_flags(parser: Any) -> None:
    """Add the options to a parser or group; all but one of them may be given only once, and together they exclude."""
    add = parser.add_argument
    add("--json-schema", metavar="FILE|JSON", action=_action("json", _schema), help="JSON that fits this JSON schema")
    add("--json-object", nargs=0, action=_action("json_object", lambda text: True), help="any JSON object")
    add("--regex", metavar="REGEX", action=_action("regex", str), help="text that matches, as a whole")
    add(
        "--choice",
        metavar="TEXT",
        action=_action("choice", str, repeats=True),
        help="one of these texts; repeat the option for each",
    )
    add("--grammar", metavar="FILE|EBNF", action=_action("grammar", _grammar), help="text of this grammar (rule root)")
    add(
        "--structured-outputs",
        metavar="JSON",
        action=_action("", _object),
        help="the same as JSON, with vLLM's keys: json, json_object, regex, choice, grammar, structural_tag, "
        "disable_any_whitespace",
    )


def read_structured(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What the options give, by the names of `StructuredOutputsParams`; None when none was typed."""
    return getattr(arguments, _COLLECTED, None)


def _action(name: str, parse: Any, *, repeats: bool = False) -> type[argparse.Action]:
    class Collect(argparse.Action):
        def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
            super().__init__(option_strings, dest=argparse.SUPPRESS, **kwargs)

        def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
            found = dict(getattr(namespace, _COLLECTED, None) or {})
            try:
                value = parse(values)
            except (ValueError, OSError) as error:
                raise ConfigError(f"{option}: {error}") from error
            if not name:
                found.update(value)
            else:
                found[name] = [*found.get(name, []), value] if repeats else value
            setattr(namespace, _COLLECTED, found)

    return Collect


def _schema(text: str) -> Any:
    """A schema as JSON, or the name of a file with one."""
    if not text.lstrip().startswith("{") and text.strip() != "true":
        path = Path(text).expanduser()
        if not path.is_file():
            raise ValueError(f"{text!r} is neither a JSON object nor a file")
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from error


def _grammar(text: str) -> str:
    """A grammar, or the name of a file with one."""
    if "::=" in text:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(f"{text!r} is neither a grammar (root ::= …) nor a file")
    return path.read_text(encoding="utf-8")


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value
