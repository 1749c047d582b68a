"""Plain values (from TOML, YAML, JSON or keyword arguments) -> attrs classes, strictly, with errors that name paths.

cattrs builds the objects; unknown keys are refused and nothing is coerced: '7' is no integer and neither is True. The
same function serves the configuration classes of plugins.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from specdec.config.introspect import field_docs, field_types, is_secret, unwrap_optional
from specdec.config.problems import (
    InvalidValueError,
    MissingSettingError,
    SeveralProblemsError,
    UnknownSettingError,
    join,
    together,
)
from specdec.config.schema import EngineConfig, SpeculativeConfig
from specdec.config.sizes import ALLOWED as SIZE_ALLOWED
from specdec.config.sizes import is_size, parse_size
from specdec.config.validators import choice, find_check, hint_for
from specdec.config.vllm_keys import ENGINE_ADVICE
from specdec.errors import ConfigError, SpecdecError

T = TypeVar("T")

DEFAULT = "default"
"""Origin of a value that no source sets."""

POSITIONAL = "MODEL"
"""Origin of the one value that the command line takes without an option."""


class _NotAllowed(Exception):
    """A value has the wrong type; ``allowed`` says what would be right."""

    def __init__(self, allowed: str) -> None:
        super().__init__(allowed)
        self.allowed = allowed


def structure(cls: type[T], data: Mapping[str, Any], section: str = "", origins: Mapping[str, str] | None = None) -> T:
    """Build an instance of an attrs class from plain values.

    Args:
        cls: the configuration class.
        data: its values by field name; nested classes are nested mappings.
        section: dotted path of the class, put before the paths in messages, for example ``speculative``.
        origins: where values came from, by dotted path; shown in messages.

    Raises:
        ConfigError: unknown keys and refused values, with path, value and what is allowed; all of them together. Rules
            about several values are looked at when each of them is right.
    """
    built, problems = _attempt(cls, data, section)
    if not problems:
        return cast("T", built)
    while data := _without(data, {problem.path: None for problem in problems}, section):
        # a refused value hides what comes behind it: look again without those that are known to be wrong
        _, more = _attempt(cls, data, section)
        known = {problem.path for problem in problems}
        new = [problem for problem in more if _is_about_one(problem) and problem.path not in known]
        if not new:
            break
        problems += new
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cast("type[attrs.AttrsInstance]", cls))
    secrets = {join(section, attribute.name) for attribute in fields if is_secret(attribute)}
    raise together([placed(_discreet(problem, secrets), origins or {}) for problem in problems])


def _discreet(problem: ConfigError, secrets: set[str]) -> ConfigError:
    """The problem without the value of a secret, which would stand in logs."""
    if not isinstance(problem, InvalidValueError) or (problem.path or "").partition("[")[0] not in secrets:
        return problem
    return InvalidValueError(str(problem.path), "…", problem.allowed, origin=problem.origin)


def _attempt(cls: type[T], data: Mapping[str, Any], section: str) -> tuple[T | None, list[ConfigError]]:
    try:
        return _converter().structure(data, cls), []
    except (ClassValidationError, ConfigError, _NotAllowed, TypeError, ValueError) as error:
        return None, list(_problems(error, cls, data, section))


def _is_about_one(problem: ConfigError) -> bool:
    """Whether it is about one setting alone, and so has nothing to do with those that were left out."""
    return isinstance(problem, InvalidValueError | UnknownSettingError)


def _without(data: Mapping[str, Any], paths: Iterable[str | None], section: str) -> dict[str, Any]:
    """A copy of the values without those at some dotted paths; empty when there is nothing to leave out."""
    copy, done = _copied(data), False
    for path in paths:
        *tables, name = (path or "").removeprefix(f"{section}.").partition("[")[0].split(".")
        inner: Any = copy
        for table in tables:
            inner = inner.get(table) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and name in inner:
            del inner[name]
            done = True
    return copy if done else {}


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in data.items()}


# --- the converter ------------------------------------------------------------------------------


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, hook in ((bool, _bool), (int, _int), (float, _float), (str, _str)):
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook_func(is_size, _size)
    converter.register_structure_hook_func(_is_any, lambda value, _: value)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_factory(_is_collection, lambda kind: _collection_hook(kind, converter))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _class_hook(cls, converter))
    return converter


def _int(value: Any, _: Any) -> int:
    if isinstance(value, bool | str | float):
        raise _NotAllowed("an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise _NotAllowed("an integer") from None


def _float(value: Any, _: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(type(value), "__float__"):
        raise _NotAllowed("a number")
    return float(value)


def _bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise _NotAllowed("true or false")
    return value


def _str(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise _NotAllowed("a string")
    return value


def _size(value: Any, _: Any) -> int | str:
    try:
        parse_size(value)
    except ValueError:
        raise _NotAllowed(SIZE_ALLOWED) from None
    return value


def _literal(value: Any, kind: Any) -> Any:
    # type(value) too: 1 == True
    if not any(value == name and type(value) is type(name) for name in get_args(kind)):
        raise _NotAllowed(choice(*map(str, get_args(kind))).allowed)
    return value


def _is_any(kind: Any) -> bool:
    return kind is Any


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, set, frozenset, dict)


def _collection_hook(kind: Any, converter: cattrs.Converter) -> Any:
    """A string is a sequence too, and cattrs would take it apart; and a list is no table."""
    origin, arguments = get_origin(kind), get_args(kind)

    def table(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _NotAllowed("a table")
        return {key: converter.structure(item, arguments[1]) for key, item in value.items()}

    def sequence(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple | set | frozenset):
            raise _NotAllowed("a list")
        if origin is tuple and len(arguments) > 1 and arguments[1] is not Ellipsis:
            if len(value) != len(arguments):
                raise _NotAllowed(f"a list of {len(arguments)}")
            return tuple(converter.structure(item, of) for item, of in zip(value, arguments, strict=True))
        return origin(converter.structure(item, arguments[0]) for item in value)

    return table if origin is dict else sequence


def _class_hook(cls: type, converter: cattrs.Converter) -> Any:
    build: Any = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
    )

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _NotAllowed("a table")
        return build(_gather_options(value) if cls is SpeculativeConfig else value, cls)

    return hook


def _gather_options(value: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``speculative`` that are not the core's own belong to the method."""
    own = {attribute.name for attribute in attrs.fields(SpeculativeConfig)} - {"options"}
    if "options" in value:
        raise InvalidValueError(
            "speculative.options",
            value["options"],
            "left out",
            hint="Write the method's options beside 'method', not in a table of their own.",
        )
    options = {str(key): item for key, item in value.items() if key not in own}
    return {**{key: item for key, item in value.items() if key in own}, "options": options}


# --- errors -------------------------------------------------------------------------------------


def _problems(error: Exception, cls: Any, data: Any, path: str) -> Iterator[ConfigError]:
    """Take an error of cattrs apart into one `ConfigError` for each setting."""
    if isinstance(error, ClassValidationError):
        for inner in error.exceptions:
            yield from _class_problems(inner, cls, data, path)
    elif isinstance(error, IterableValidationError):
        for inner in error.exceptions:
            note = _note(inner, IterableValidationNote)
            yield from _problems(inner, None, data, f"{path}[{note.index}]" if note else path)
    elif isinstance(error, ConfigError):
        yield error
    else:
        allowed = error.allowed if isinstance(error, _NotAllowed) else f"something else ({error})"
        yield InvalidValueError(path or "configuration", data, allowed)


def _class_problems(error: Exception, cls: Any, data: Any, path: str) -> Iterator[ConfigError]:
    note = _note(error, AttributeValidationNote)
    known = [attribute.name for attribute in attrs.fields(cls) if attribute.name != "options"]
    if isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(map(str, error.extra_fields)):
            advice = ENGINE_ADVICE.get(key.replace("-", "_")) if cls is EngineConfig else None
            yield UnknownSettingError(join(path, key), known, advice=advice)
    elif note is None:
        yield _from_validator(error, cls, data, path)
    elif isinstance(error, KeyError):
        yield MissingSettingError(join(path, note.name), _what_it_is(cls, note.name))
    else:
        yield from _field_problems(error, cls, data, join(path, note.name), note.name)


def _what_it_is(cls: Any, name: str) -> str:
    """What to give for a field without a default, in the words of its docstring."""
    doc = field_docs(cls).get(name, "")
    return f"It must be given: {doc[:1].lower()}{doc[1:]}" if doc else f"Set {name!r} in the configuration."


def _field_problems(error: Exception, cls: Any, data: Any, path: str, name: str) -> Iterator[ConfigError]:
    """An error while one field was built: the field's own validator knows best what is allowed."""
    value = data[name] if isinstance(data, Mapping) else data
    check = find_check(attrs.fields_dict(cls)[name].validator)
    if isinstance(error, _NotAllowed):
        allowed = check.allowed if check else error.allowed
        yield InvalidValueError(path, value, allowed, hint=hint_for(value, check))
    else:
        inner, _ = unwrap_optional(field_types(cls)[name])
        yield from _problems(error, inner, value, path)


def _from_validator(error: Exception, cls: Any, data: Any, path: str) -> ConfigError:
    """An error raised while the object was made: by our validators, by attrs' own, or by a cross-field rule."""
    if isinstance(error, InvalidValueError | UnknownSettingError):
        return error.moved(_prefixed(path, error.path or ""), error.origin)
    if isinstance(error, ConfigError):
        return error
    # attrs' validators put the attribute into the arguments of the error, or quote its name first
    name = next((argument.name for argument in error.args if isinstance(argument, attrs.Attribute)), None)
    text = str(error.args[0]) if error.args else type(error).__name__
    if name is None:
        name = next((a.name for a in attrs.fields(cls) if text.startswith(f"'{a.name}'")), None)
    if name is None:
        return ConfigError(f"{path}: {text}" if path else text, path=path or None)
    options = getattr(attrs.fields_dict(cls)[name].validator, "options", None)
    allowed = re.search(r"must be (.*?)(?:: [^:]*| \(got .*)?$", text)
    if options is None and allowed is None:
        return ConfigError(f"{join(path, name)}: {text}", path=join(path, name))
    value = data.get(name) if isinstance(data, Mapping) else None
    if options is not None:
        check = choice(*map(str, options))
        return InvalidValueError(join(path, name), value, check.allowed, hint=hint_for(value, check))
    assert allowed is not None
    return InvalidValueError(join(path, name), value, allowed[1])


def _prefixed(section: str, path: str) -> str:
    return path if not section or path == section or path.startswith(f"{section}.") else join(section, path)


@contextmanager
def naming_origins(origins: Mapping[str, str]) -> Iterator[None]:
    """Let what is raised inside say where the setting at fault came from; see `placed`."""
    try:
        yield
    except SpecdecError as error:
        problem = placed(error, origins)
        if problem is error:
            raise
        raise problem from error


def placed(problem: SpecdecError, origins: Mapping[str, str]) -> SpecdecError:
    """The problem with where its value, or else the table it is in, came from, as ``origins`` (by dotted path) says.

    What says its origin already is left alone. Problems without a place for it get a note, unless the value stands on
    the command line, where nobody has to look for it.
    """
    if isinstance(problem, SeveralProblemsError):
        parts = [placed(one, origins) for one in problem.problems]
        changed = any(new is not old or _notes(new) for new, old in zip(parts, problem.problems, strict=True))
        return SeveralProblemsError(parts) if changed else problem
    if not problem.path or isinstance(problem, MissingSettingError):
        return problem
    origin = nearest_origin(problem.path.partition("[")[0], origins)
    if origin in (None, "", DEFAULT):
        return problem
    if isinstance(problem, InvalidValueError | UnknownSettingError):
        return problem if problem.origin else problem.moved(problem.path, origin)
    note = f"{problem.path} comes from {origin}"
    if not str(origin).startswith(("-", POSITIONAL)) and note not in _notes(problem):
        problem.add_note(note)
    return problem


def _notes(problem: SpecdecError) -> list[str]:
    return getattr(problem, "__notes__", [])


def nearest_origin(path: str, origins: Mapping[str, str]) -> str | None:
    """The origin of a dotted path, or of the nearest table around it; None when nothing is known."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return None


def _note(error: BaseException, kind: type[T]) -> T | None:
    return next((note for note in getattr(error, "__notes__", ()) if isinstance(note, kind)), None)
