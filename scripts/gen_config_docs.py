"""Writes docs/reference/configuration.md from the configuration classes; with --check, fails when it is out of date."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from pages import code, head, members, prose, table, write_or_check

from specdec.config.flags import flag_name
from specdec.config.introspect import Leaf, leaves
from specdec.config.load import variable_name
from specdec.config.schema import EngineConfig
from specdec.config.sizes import is_size
from specdec.config.validators import find_check
from specdec.registry import PluginEntry, Registry
from specdec.registry.catalogue import KINDS
from specdec.sampling.params import SamplingParams

LEAD = """\
Every setting, from the classes that check it. Sources, later ones win: the defaults below, a file, environment
variables, the command line or the keyword arguments of `LLM` and `AsyncLLM`.

- **File:** `--config FILE`, else the file named in `SPECDEC_CONFIG`, else `specdec.toml` (or `.yaml`, `.json`) of the
  working directory. Dotted keys are tables: `speculative.method` is `method` in `[speculative]`. Python reads no
  file.
- **Environment:** the key in capitals with `SPECDEC_` before it and `_` for dots: `SPECDEC_BLOCK_SIZE=32`,
  `SPECDEC_SPECULATIVE_METHOD=ngram`. `SPECDEC_SPECULATIVE_CONFIG` is the whole table `speculative` as JSON.
- **Command line:** the key with dashes: `--block-size 32`, `--speculative.method ngram`; `--set KEY=VALUE` for any
  key, options of plugins included; `--speculative-config JSON`. Tables are JSON, lists `a,b`; `none` unsets what may
  be not set.
- **Python:** `LLM("demo:smollm2", block_size=32, speculative_config={"method": "ngram"})`.

A key that does not exist is an error, with the nearest that does. `specdec config` prints each value in effect and
its origin.
"""

COLUMNS = ("key", "type", "default", "meaning")

KIND_LEADS = {
    "proposer": (
        "Options of the methods",
        "They stand beside `method` in `speculative`; a method's section names the package that brings it.",
    ),
    "verifier": ("Options of the verifiers", "They stand in `verifier_options`."),
    "grammar": ("Options of the grammar backends", "They stand in `grammar_options`."),
    "logits_processor": (
        "Options of the logits processors",
        "They stand in `logits_processor_options.<name>`.",
    ),
}


def page() -> str:
    """The whole page."""
    parts = [
        head("gen_config_docs.py", "the attrs classes of the configuration", "Configuration", LEAD),
        _section("Engine", _without(leaves(EngineConfig), "speculative.", "plugins.")),
        _section("Speculation", _only(leaves(EngineConfig), "speculative.")),
        _section("Plugins", _only(leaves(EngineConfig), "plugins.")),
        *_plugin_options(),
        _server(),
        "## Sampling parameters\n\n"
        "Fields of `specdec.SamplingParams`; `specdec generate` has options and the server's requests have fields for "
        "most of them. They belong to a request, not to the configuration.\n\n" + _table(leaves(SamplingParams)),
        _variables(),
    ]
    return "\n".join(parts)


def _section(title: str, found: Iterable[Leaf]) -> str:
    return f"## {title}\n\n{_table(found)}"


def _table(found: Iterable[Leaf]) -> str:
    rows = [(code(leaf.path), code(_type(leaf)), code(_default(leaf)), prose(_meaning(leaf))) for leaf in found]
    return table(COLUMNS, rows)


def _only(found: Iterable[Leaf], prefix: str) -> Iterator[Leaf]:
    return (leaf for leaf in found if leaf.path.startswith(prefix))


def _without(found: Iterable[Leaf], *prefixes: str) -> Iterator[Leaf]:
    return (leaf for leaf in found if not leaf.path.startswith(prefixes))


def _plugin_options() -> Iterator[str]:
    registry, own = Registry(), members()
    for kind, (title, lead) in KIND_LEADS.items():
        entries = [e for e in registry.entries() if e.kind == kind and e.name and e.distribution in own]
        yield f"## {title}\n\n{lead}\n"
        for entry in entries:
            yield _options(registry, entry)


def _options(registry: Registry, entry: PluginEntry) -> str:
    assert entry.kind is not None
    assert entry.name is not None
    plugin = registry.load(entry.kind, entry.name)
    section = KINDS[entry.kind].section(entry.name)
    found = leaves(plugin.build("config_class"), section) if plugin.implements("config_class") else ()
    listed = _table(found) or "No options.\n"
    return f"### `{entry.name}`\n\nFrom `{entry.distribution}`.\n\n{listed}"


def _server() -> str:
    from specdec_server.config import ServerConfig

    lead = (
        "The table `[server]`, which `specdec serve` reads; its options on the command line have no prefix (`--port`), "
        "its variables do (`SPECDEC_SERVER_PORT`)."
    )
    return f"## Server\n\n{lead}\n\n{_table(leaves(ServerConfig, 'server'))}"


def _variables() -> str:
    rows = [
        ("`SPECDEC_CONFIG`", "configuration file"),
        (code(variable_name("speculative_config")), "the table `speculative` as JSON"),
        ("`SPECDEC_<KEY>`", "any setting of the engine, speculation, plugins and server tables above"),
        ("`SPECDEC_API_KEY`", "the key that `specdec bench serve` sends"),
        (
            "`SPECDEC_CACHE`",
            "cache directory for compiled kernels and converted checkpoints, "
            f"unless `cache_dir` ({flag_name('cache_dir')}) is set",
        ),
        (
            "`SPECDEC_PLUGINS_ALLOW`, `SPECDEC_PLUGINS_BLOCK`",
            "as `plugins.allow` and `plugins.block`, also where no configuration is read",
        ),
        (
            "`OMP_WAIT_POLICY`, `GOMP_SPINCOUNT`, `KMP_BLOCKTIME`",
            "when set, specdec leaves the waiting of OpenMP threads as it is",
        ),
    ]
    return f"## Environment variables\n\n{table(('variable', 'meaning'), rows)}"


# --- one field ----------------------------------------------------------------------------------


def _meaning(leaf: Leaf) -> str:
    check = find_check(leaf.attribute.validator)
    allowed = "" if check is None or check.names else check.allowed
    informative = any(character.isdigit() or character == "'" for character in allowed)
    return f"{leaf.doc.rstrip('.')}; {allowed}." if informative else leaf.doc


def _default(leaf: Leaf) -> str:
    default = leaf.attribute.default
    if default is attrs.NOTHING:
        return "required"
    factory = getattr(default, "factory", None)
    value = factory() if factory is not None else default
    if value is None:
        return "not set"
    if isinstance(value, tuple | list | dict) and not value:
        return "empty"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(leaf: Leaf) -> str:
    check = find_check(leaf.attribute.validator)
    if check is not None and check.names:
        return " | ".join(check.names)
    return _type_name(leaf.annotation)


_NAMES = {str: "string", int: "integer", float: "number", bool: "true | false", Any: "any"}


def _type_name(annotation: Any) -> str:
    if annotation in _NAMES:
        return _NAMES[annotation]
    if is_size(annotation):
        return "size"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(dict.fromkeys(_type_name(a) for a in arguments if a is not type(None)))
    if origin in (tuple, list):
        return f"list of {_type_name(arguments[0])}"
    if origin is not None and issubclass(origin, typing.Mapping):  # type: ignore[arg-type]
        return "table"
    return getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    sys.exit(write_or_check("configuration.md", "the configuration classes", page))
