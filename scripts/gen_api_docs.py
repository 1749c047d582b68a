"""Writes docs/reference/python.md from the public names' docstrings; with --check, fails when it is out of date."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from pages import code, head, prose, table, write_or_check

import specdec
from specdec.config.introspect import field_docs

LEAD = """\
The names a program uses come from `specdec` itself; a plugin's author uses those further down as well. Everything
else may change without notice. Hooks have a page of their own: [Hooks](hooks.md). Fields of statistics are on
[Metrics](metrics.md), those of `SamplingParams` under [Configuration](configuration.md#sampling-parameters).
"""

ELSEWHERE = {"SamplingParams": "configuration.md#sampling-parameters"}

AUTHORS = {
    "Proposers and heads": ("specdec.drafting", ("Proposer", "DraftHead", "MaskRow")),
    "Verifiers": ("specdec.verify", ("Verifier",)),
    "Logits processors": ("specdec.sampling.processor", ("LogitsProcessor",)),
    "Grammar backends": ("specdec.grammar", ("GrammarBackend", "CompiledGrammar", "GrammarMatcher")),
    "Attention backends": ("specdec.attention.interface", ("AttentionBackend", "KVCache", "LayerKV")),
    "Sampling backends": ("specdec.sampling.backend", ("SamplingBackend",)),
    "Stat loggers": ("specdec.metrics", ("StatLogger",)),
    "Values of a step": (
        "specdec.types",
        (
            "ProposalInput",
            "Draft",
            "DraftOutcome",
            "RequestInfo",
            "ComputedStep",
            "PackedBatch",
            "TargetOutput",
            "Rows",
            "Verdict",
            "AttentionRequirements",
            "AttentionLayer",
            "Needs",
            "ProposerCapabilities",
            "EngineContext",
            "TargetInfo",
        ),
    ),
}
"""Title -> module and the names an author needs of it."""


def page() -> str:
    """The whole page."""
    names = [name for name in specdec.__all__ if not name.startswith("__")]
    parts = [head("gen_api_docs.py", "docstrings", "Python", LEAD), "## For programs\n"]
    parts += [_class(getattr(specdec, name), "specdec") for name in names]
    parts += ["## Errors\n", _errors()]
    for title, (module, classes) in AUTHORS.items():
        parts.append(f"## {title}\n")
        for name in classes:
            cls = getattr(importlib.import_module(module), name)
            parts += [_class(cls, module), *_details(cls)]
    return "\n".join(parts)


def _class(cls: type, module: str) -> str:
    text = [f"### `{module}.{cls.__name__}`\n", _docstring(cls)]
    if cls.__name__ in ELSEWHERE:
        text.append(f"Its fields: [{cls.__name__}]({ELSEWHERE[cls.__name__]}).\n")
    else:
        text.append(table(("attribute", "meaning"), _attributes(cls)))
    text.append(table(("method", "does"), _methods(cls)))
    return "\n".join(part for part in text if part)


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    docs = field_docs(cls)
    names = [f.name for f in attrs.fields(cls)] if attrs.has(cls) else list(docs)
    for name in names:
        if not name.startswith("_"):
            yield code(name), prose(docs.get(name, ""))
    for name, value in vars(cls).items():
        if isinstance(value, property) and not name.startswith("_"):
            yield code(name), prose(_summary(value))


def _methods(cls: type) -> Iterator[tuple[str, str]]:
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
            yield code(f"{name}({_parameters(function)})"), prose(_summary(function))


def _details(cls: type) -> Iterator[str]:
    """What a plugin's author must know of each method beyond its summary: arguments, results, errors."""
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("_") and "\n\n" in (inspect.getdoc(value) or ""):
            yield f"#### `{cls.__name__}.{name}({_parameters(value)})`\n\n{_docstring(value)}"


def _parameters(function: Callable[..., Any]) -> str:
    """Names and defaults; types stand in the sources and in the docstrings."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found and not any(p.startswith("*") for p in found):
            found.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{star}{parameter.name}{default}")
    return ", ".join(found)


def _summary(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _docstring(thing: Any) -> str:
    """A docstring: paragraphs, then arguments and errors as lists."""
    lines, in_list = [], False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if re.fullmatch(r"(Args|Raises|Returns):", line):
            lines += [f"**{line}**", ""]
            in_list = True
        elif in_list and (item := re.fullmatch(r"    (\w+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {prose(item[2])}")
        elif in_list and line.strip():
            lines.append(f"  {prose(line.strip())}")
        elif line.startswith("    "):
            lines.append(line)
        else:
            lines.append(prose(line))
    return "\n".join(lines) + "\n"


def _errors() -> str:
    errors = importlib.import_module("specdec.errors")
    rows = [
        (code(name), code(value.__base__.__name__) if value.__base__ is not Exception else "", prose(_summary(value)))
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.SpecdecError)
    ]
    return f"In `specdec.errors`. All are `SpecdecError`s.\n\n{table(('error', 'a', 'when'), rows)}"


if __name__ == "__main__":
    sys.exit(write_or_check("python.md", "the public names", page))
