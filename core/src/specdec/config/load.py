"""From files, environment, command line or keyword arguments to an `EngineConfig`.

Later sources win: the fields' defaults, the file, environment variables, the command line (or the keyword arguments).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from specdec.config import files
from specdec.config.introspect import leaves
from specdec.config.problems import (
    InvalidValueError,
    MissingSettingError,
    SettingsConflictError,
    UnknownSettingError,
    closest,
    join,
)
from specdec.config.schema import EngineConfig, SpeculativeConfig
from specdec.config.structure import DEFAULT as DEFAULT
from specdec.config.structure import nearest_origin, structure
from specdec.config.text import parse_text

T = TypeVar("T")

ENVIRONMENT_PREFIX = "SPECDEC_"
CONFIG_VARIABLE = "SPECDEC_CONFIG"
"""Names the configuration file when no option does."""

COMMAND_TABLES = {"server": "serve"}
"""Tables that belong to a command, not to the engine, and that command. `load` leaves them out of a file; the command
reads its table with `load_table` and the class that its plugin's `config_class` returns."""


@attrs.frozen
class Layer:
    """The values of one source, and where each came from."""

    values: dict[str, Any]
    """Nested like a file."""
    origins: dict[str, str]
    """By dotted path; what is missing takes the origin of the table it is in."""
    replaces: tuple[str, ...] = ()
    """Tables that this source gives whole: what earlier sources say about them is dropped."""


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origins: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[EngineConfig, dict[str, str]]:
    """Load the configuration of an engine.

    Args:
        path: a .toml, .yaml or .json file. None takes the file named in ``SPECDEC_CONFIG``, else ``specdec.toml`` (or
            .yaml, .json) of the working directory when there is one.
        overrides: values of the command line by dotted path, ``{"speculative.method": "ngram"}``; a table given as a
            whole (``{"speculative": {...}}``) replaces what the file says about it.
        origins: where each override came from, by the same paths; "command line" when not said.
        environ: the environment; `os.environ` when None.

    Returns:
        The configuration, and the origin of every setting by dotted path: ``default``, ``file:line``,
        ``environment NAME`` or what ``origins`` says.

    Raises:
        ConfigError: a file cannot be read, a setting is unknown or has a bad value.
    """
    environ = os.environ if environ is None else environ
    file = _choose_file(path, environ)
    layers = [_without_command_tables(Layer(*files.read(file)))] if file else []
    layers.append(environment_layer(environ))
    layers.append(override_layer(overrides or {}, origins or {}))
    return combine(layers)


def load_table(
    name: str,
    cls: type[T],
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origins: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[T, dict[str, str]]:
    """Load a command's own table from the sources that `load` has for the engine's settings.

    Args:
        name: the table, a key of `COMMAND_TABLES`.
        cls: the attrs class of its settings.
        path: as for `load`.
        overrides: values of the command line by dotted path, ``{"server.port": 9000}``.
        origins: as for `load`.
        environ: as for `load`; ``SPECDEC_SERVER_PORT`` sets ``server.port``.

    Returns:
        The configuration, and the origin of every setting by dotted path, as `load` gives them.

    Raises:
        ConfigError: as `load`, and when the name does not stand for a table in the file.
    """
    assert name in COMMAND_TABLES
    environ = os.environ if environ is None else environ
    file = _choose_file(path, environ)
    layers = [_only_table(name, Layer(*files.read(file)))] if file else []
    layers.append(environment_layer(environ, cls, name))
    layers.append(override_layer(overrides or {}, origins or {}))
    values, known = merged(layers)
    config = structure(cls, values.get(name, {}), name, known)
    return config, {leaf.path: known.get(leaf.path) or DEFAULT for leaf in leaves(cls, name)}


def from_kwargs(model: str | os.PathLike[str], **kwargs: Any) -> EngineConfig:
    """The configuration for ``LLM(model, **kwargs)``; see `from_kwargs_with_origins`."""
    return from_kwargs_with_origins(model, **kwargs)[0]


def from_kwargs_with_origins(model: str | os.PathLike[str], **kwargs: Any) -> tuple[EngineConfig, dict[str, str]]:
    """The configuration for ``LLM(model, **kwargs)``, and the origins of what environment variables set.

    Args:
        model: the target model.
        kwargs: fields of `EngineConfig`; ``speculative_config`` is a dict with vLLM's keys, a `SpeculativeConfig` or
            None. ``torch.bfloat16`` and ``torch.device("cpu")`` are taken like their names. Environment variables set
            what is not given.

    Raises:
        ConfigError: unknown keywords and bad values.
    """
    if "speculative_config" in kwargs:
        if "speculative" in kwargs:
            raise SettingsConflictError(
                "speculative_config and speculative are the same setting: give one of them.", path="speculative"
            )
        kwargs["speculative"] = kwargs.pop("speculative_config")
    values = {name: _plain(value) for name, value in {"model": model, **kwargs}.items()}
    layers = [environment_layer(os.environ), Layer(values, {}, tuple(values))]
    config, origins = combine(layers)
    return config, {path: at for path, at in origins.items() if at != DEFAULT}


def combine(layers: Iterable[Layer]) -> tuple[EngineConfig, dict[str, str]]:
    """Merge sources, later ones first in rank, and build the configuration.

    Raises:
        ConfigError: as `load`.
    """
    values, origins = merged(layers)
    if values.get("model") is None:
        structure(EngineConfig, {**values, "model": "m"}, origins=origins)  # a misspelt key may be what should say it
        remedy = "Pass --model, or set it in specdec.toml; demo:smollm2 is the demonstration model."
        raise MissingSettingError("model", remedy)
    config = structure(EngineConfig, values, origins=origins)
    return config, _all_origins(config, origins)


def merged(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of all sources, later ones first in rank, and the origin of each by dotted path."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for table in layer.replaces:
            _drop(values, origins, table)
        _merge(values, layer.values)
        origins.update({path: nearest_origin(path, layer.origins) or "" for path in files.paths(layer.values)})
    return values, origins


def environment_layer(environ: Mapping[str, str], cls: type = EngineConfig, section: str = "") -> Layer:
    """The settings in environment variables: ``SPECDEC_`` and the dotted path in capitals with ``_`` for the dots.

    ``SPECDEC_SPECULATIVE_CONFIG`` holds the engine's whole ``speculative`` table as JSON.

    Args:
        environ: the environment.
        cls: the configuration class whose settings are looked for.
        section: the table it stands for; empty for the engine's settings.

    Raises:
        ConfigError: a value cannot be parsed, or a variable looks like a misspelt setting.
    """
    known: dict[str, tuple[str, Any]] = {
        variable_name(leaf.path): (leaf.path, leaf.annotation) for leaf in leaves(cls, section)
    }
    if cls is EngineConfig:
        known[variable_name("speculative_config")] = ("speculative", SpeculativeConfig | None)
    prefix = variable_name(f"{section}.") if section else ENVIRONMENT_PREFIX
    values, origins, whole = dict[str, Any](), dict[str, str](), list[str]()
    # the whole table first, so that single settings of it can be added
    names = sorted(
        (name for name in environ if name.startswith(prefix) and environ[name]),
        key=lambda name: known.get(name, ("", None))[0] != "speculative",
    )
    for name in names:
        if name not in known:
            _refuse_misspelt(name, known)
            continue
        path, annotation = known[name]
        origins[path] = f"environment {name}"
        _set(values, path, parse_text(annotation, environ[name], path, origins[path]))
        if path == "speculative":
            whole.append(path)
    return Layer(values, origins, tuple(whole))


def override_layer(overrides: Mapping[str, Any], origins: Mapping[str, str]) -> Layer:
    """The settings of the command line, by dotted path."""
    values: dict[str, Any] = {}
    whole = [path for path, value in overrides.items() if isinstance(value, Mapping) or value is None]
    for path in sorted(overrides, key=lambda path: path.count(".")):
        _set(values, path, overrides[path])
    named = {path: origins.get(path, "command line") for path in overrides}
    return Layer(values, named, tuple(whole))


def setting_paths(config: EngineConfig) -> list[str]:
    """Dotted paths of the settings of a configuration: its fields, and the method's options that were given."""
    speculative = config.speculative
    found = [leaf.path for leaf in leaves(EngineConfig) if speculative or not leaf.path.startswith("speculative.")]
    last = max((i for i, path in enumerate(found) if path.startswith("speculative.")), default=-1)
    extra = [join("speculative", key) for key in speculative.options] if speculative else ["speculative"]
    return [*found[: last + 1], *extra, *found[last + 1 :]]


def variable_name(path: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + path.replace(".", "_").upper()


def _only_table(name: str, layer: Layer) -> Layer:
    table = layer.values.get(name, {})
    if not isinstance(table, Mapping):
        raise InvalidValueError(name, table, "a table", origin=layer.origins.get(name))
    return Layer({name: table}, {key: at for key, at in layer.origins.items() if key.partition(".")[0] == name})


def _without_command_tables(layer: Layer) -> Layer:
    values = {key: value for key, value in layer.values.items() if key not in COMMAND_TABLES}
    origins = {path: at for path, at in layer.origins.items() if path.partition(".")[0] not in COMMAND_TABLES}
    return Layer(values, origins, layer.replaces)


# --- merging ------------------------------------------------------------------------------------


def _choose_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    named = path or environ.get(CONFIG_VARIABLE)
    return Path(named) if named else files.find(Path())


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            old = into.get(key)
            into[key] = dict(old) if isinstance(old, Mapping) else {}
            _merge(into[key], value)
        else:
            into[key] = value


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[name] = dict(value) if isinstance(value, Mapping) else value


def _drop(values: dict[str, Any], origins: dict[str, str], path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        values = values.get(section, {})
    values.pop(name, None)
    for known in [known for known in origins if known == path or known.startswith(f"{path}.")]:
        del origins[known]


def _all_origins(config: EngineConfig, origins: Mapping[str, str]) -> dict[str, str]:
    """The origin of every setting of the finished configuration."""
    return {path: origins.get(path) or DEFAULT for path in setting_paths(config)}


def _refuse_misspelt(name: str, known: Iterable[str]) -> None:
    """Other programs may own variables with our prefix; only what nearly is a setting must be a mistake."""
    near = closest(name, known, cutoff=0.9)
    if name != CONFIG_VARIABLE and near is not None:
        raise UnknownSettingError(name, [near], origin="environment")


def _plain(value: Any) -> Any:
    """Python values as a file would hold them: torch's dtypes and devices by name, paths as strings."""
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, SpeculativeConfig):
        return value
    return list(value) if isinstance(value, tuple | set | frozenset) else value
