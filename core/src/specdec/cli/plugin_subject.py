"""Builds an installed plugin's object for its contract tests: by its hook, for a small random target or a given one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.config import EngineConfig, from_kwargs, to_dict
from specdec.errors import ConfigError, SpecdecError
from specdec.registry.catalogue import KINDS
from specdec.testing import engine_context, tiny_model

if TYPE_CHECKING:
    from specdec.registry import Registry
    from specdec.registry.loading import Plugin
    from specdec.target.model import TargetModel
    from specdec.types import EngineContext

NUM_TARGET_LAYERS = 8
"""Of the random target: enough for heads that read three of its layers."""

EXAMPLE = """--options '{"model": "DIRECTORY"}'"""


@attrs.frozen
class Subject:
    """What a contract is run against."""

    build: Callable[[Any], Any]
    """Makes a new object, given the contract class."""
    sizes: Mapping[str, int]
    """Class variables of the contract that follow from the target."""


def subject_of(registry: Registry, plugin: Plugin, options: dict[str, Any]) -> Subject:
    """Prepare a plugin for its contract.

    Args:
        registry: where it comes from.
        plugin: loaded.
        options: its options; for a head the keys ``model`` (its checkpoint) and those of its configuration that shall
            be otherwise. The key ``target`` names a model to check with instead of a small random one; its sizes follow
            from ``model``.

    Raises:
        ConfigError: options are wrong, or ones without which it cannot be built are missing.
    """
    kind = str(plugin.entry.kind)
    given = {"target": options.pop("target", None), "model": options.get("model")}
    if kind == "head":
        if not options.get("model"):
            raise ConfigError(f"A head is checked with a checkpoint: {EXAMPLE}. {_TARGET}", path="model")
        config: Any = options
    else:
        config = _config(registry, plugin, options)
    factory = _Factory(registry, plugin, config, given)
    return Subject(factory.build, factory.sizes())


_TARGET = 'With "target": "MODEL" it is checked with that model instead of a small random one of the same sizes.'


def _config(registry: Registry, plugin: Plugin, options: Mapping[str, Any]) -> Any:
    kind, name = str(plugin.entry.kind), str(plugin.entry.name)
    try:
        return registry.plugin_config(kind, name, options)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nOptions of the {KINDS[kind].label} are given as JSON, for example {EXAMPLE}; "
            f"`specdec plugins info {name}` lists them. {_TARGET}",
            path=error.path,
        ) from error


@attrs.frozen(eq=False)
class _Factory:
    """Makes objects of one plugin."""

    registry: Registry
    plugin: Plugin
    config: Any
    given: Mapping[str, Any]

    def sizes(self) -> dict[str, int]:
        """What the contract must know of the target; nothing when its own values hold."""
        if not self.given["model"] and not self.given["target"]:
            return {}
        target = self._bound_target(64)
        info = target.info
        return {
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "num_target_layers": info.num_layers,
        }

    def build(self, contract: Any) -> Any:
        """A new object for a contract class."""
        kind, hook = str(self.plugin.entry.kind), KINDS[str(self.plugin.entry.kind)].hook
        context = self._context(contract)
        return getattr(self, f"_{kind}", self._plain)(hook, context, contract)

    def _plain(self, hook: str, context: EngineContext, contract: Any) -> Any:
        return self.plugin.build(hook, config=self.config, engine=context)

    def _proposer(self, hook: str, context: EngineContext, contract: Any) -> Any:
        self.registry.check(str(self.plugin.entry.name), self.config, context)
        proposer = self.plugin.build(hook, config=self.config, engine=context)
        needs = proposer.needs
        if needs.follows_target:
            # these are given the computed step, which has at least one computed token
            contract.shortest_text = max(2, contract.shortest_text)
        proposer.load(context.target)
        return proposer

    def _attention_backend(self, hook: str, context: EngineContext, contract: Any) -> Any:
        requirements = context.target.requirements(contract.block_size)
        return self.plugin.build(hook, requirements=requirements, engine=context)

    def _sampling_backend(self, hook: str, context: EngineContext, contract: Any) -> Any:
        return self.plugin.build(hook, engine=context)

    def _head(self, hook: str, context: EngineContext, contract: Any) -> Any:
        from specdec.drafting.checkpoint import resolve_head

        overrides = {key: value for key, value in self.config.items() if key != "model"}
        checkpoint = resolve_head(str(self.config["model"]))
        return self.plugin.build(hook, checkpoint=checkpoint, overrides=overrides, engine=context)

    def _context(self, contract: Any) -> EngineContext:
        target = self._bound_target(getattr(contract, "vocab_size", 64))
        sizes = ("max_model_len", "num_speculative_tokens", "block_size")
        declared = {name: getattr(contract, name) for name in sizes if hasattr(contract, name)}
        tokenizer = target.tokenizer
        info = target.info
        if hasattr(contract, "end_token_ids"):
            tokenizer = contract.tokenizer()
            info = attrs.evolve(info, eos_token_ids=contract.end_token_ids)
        settings = to_dict(from_kwargs(target.info.model))
        context = engine_context(
            target=target, tokenizer=tokenizer, settings=settings, registry=self.registry, **declared
        )
        return attrs.evolve(context, target_info=info)

    def _bound_target(self, vocab_size: int) -> TargetModel:
        model, target = self.given["model"], self.given["target"]
        return _target(str(target) if target else None, str(model) if model else None, vocab_size)


@functools.cache
def _target(name: str | None, model: str | None, vocab_size: int) -> TargetModel:
    """The target a plugin is checked with, bound to a cache as large as the proposers' contract needs."""
    from specdec.attention.sdpa import SdpaBackend
    from specdec.target.model import load_target
    from specdec.testing.contracts import ProposerContract
    from specdec.types import Needs

    with tempfile.TemporaryDirectory() as folder:
        if name is None:
            sizes = _sizes_for(model) if model else {"vocab_size": vocab_size}
            name = str(tiny_model("llama", Path(folder), num_hidden_layers=NUM_TARGET_LAYERS, **sizes))
        target = load_target(EngineConfig(model=name, dtype="float32", device="cpu"))
    cache = target.allocate_kv_cache(ProposerContract.num_blocks, ProposerContract.block_size)
    target.bind(SdpaBackend(), cache, Needs())
    return target


def _sizes_for(model: str) -> dict[str, int]:
    """Sizes of a target that a head or draft model was made for, from its configuration."""
    from specdec.drafting.checkpoint import read_head_config, resolve_head

    config = read_head_config(resolve_head(model))
    sizes = {
        "vocab_size": config.get("vocab_size"),
        "hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "num_attention_heads": config.get("num_attention_heads"),
        "num_key_value_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
    }
    if not sizes["vocab_size"] or not sizes["hidden_size"]:
        raise SpecdecError(f"{model}: its configuration does not say what target it is for. {_TARGET}")
    return {key: int(value) for key, value in sizes.items() if value}
