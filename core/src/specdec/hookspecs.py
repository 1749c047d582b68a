"""Every hook a specdec plugin can implement; this file is the contract.

A plugin is a module named by an entry point. It holds functions marked with `hookimpl`, and implementations may
leave out arguments they do not use. Hooks are factories: each is called while an engine starts (or
while the command line is built), never in the step loop. The loop calls the methods of the objects they return.

Groups and hooks:

=============================== ==================== ==============================================
entry-point group               hook                 object returned
=============================== ==================== ==============================================
``specdec.proposers``           `propose`            `specdec.drafting.Proposer`
``specdec.heads``               `draft_head`         `specdec.drafting.DraftHead`
``specdec.verifiers``           `verify`             `specdec.verify.Verifier`
``specdec.attention_backends``  `attention_backend`  `specdec.attention.AttentionBackend`
``specdec.sampling_backends``   `sampling_backend`   `specdec.sampling.backend.SamplingBackend`
``specdec.grammars``            `grammar`            `specdec.grammar.GrammarBackend`
``specdec.logits_processors``   `logits_processor`   `specdec.sampling.processor.LogitsProcessor`
``specdec.stat_loggers``        `stat_logger`        `specdec.metrics.StatLogger`
``specdec.commands``            `add_command`        nothing
=============================== ==================== ==============================================

Any plugin may also implement `config_class` (its own options) and, for proposers, `identify` and `check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.attention.interface import AttentionBackend
    from specdec.drafting.base import DraftHead, Proposer
    from specdec.grammar.interface import GrammarBackend
    from specdec.metrics.loggers import StatLogger
    from specdec.sampling.backend import SamplingBackend
    from specdec.sampling.processor import LogitsProcessor
    from specdec.types import AttentionRequirements, EngineContext, Identification, ProposerCapabilities
    from specdec.verify.base import Verifier

PROJECT = "specdec"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def propose(config: Any, engine: EngineContext) -> Proposer | None:
    """Build the proposer of a method for an engine.

    When called: once per engine, after the target is loaded, on the engine's thread.

    Args:
        config: instance of the class returned by `config_class`, validated; for a plugin without one, an empty mapping.
        engine: facts about the engine and its target; read-only.

    Returns:
        A `specdec.drafting.Proposer`. None means "not mine" and is an error when no other plugin answers.

    Raises:
        PluginUnsuitableError: the method cannot serve this target; the engine does not start and shows all reasons.
        SpecdecError: anything else a user must act on. Other exceptions stop the start and name the plugin.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def check(config: Any, engine: EngineContext) -> ProposerCapabilities | None:
    """Refuse, before the target's weights are read, what a proposer cannot do with them.

    Loading a target takes long: what configuration files, names of tensors and installed plugins tell of a mistake
    belongs here, in functions that `propose` need not call again. `specdec.drafting.checkpoint.check_head` does it for
    the checkpoint of a head.

    When called: once per engine before the target is loaded, on the engine's thread.

    Args:
        config: as for `propose`.
        engine: facts about the engine as its configuration and the target's ``config.json`` tell them:
            ``engine.target`` and ``engine.tokenizer`` are None, ``max_model_len`` is an upper bound.

    Returns:
        What the drafts will be like as far as that is known, so that a verifier which does not take them is refused now
        too; or None.

    Raises:
        SpecdecError: shown as it is. Other exceptions stop the start and name the plugin.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def verify(config: Any, engine: EngineContext) -> Verifier | None:
    """Build the verifier for an engine.

    When called: once per engine, before the target is loaded; see `check` for what that means for ``engine``.

    Args:
        config: instance of the plugin's `config_class`, or an empty mapping.
        engine: facts about the engine and its target; read-only.

    Returns:
        A `specdec.verify.Verifier`.

    Raises:
        SpecdecError: shown as it is. Other exceptions stop the start and name the plugin.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def attention_backend(requirements: AttentionRequirements, engine: EngineContext) -> AttentionBackend | None:
    """Build an attention backend over the paged KV cache.

    When called: once per engine, after the target's attention layers are known and before the KV cache is made.
    With ``attention_backend = "auto"`` each installed backend is built and asked `AttentionBackend.supports`; of those
    that serve the engine the one with the highest `AttentionBackend.priority` is taken.

    Args:
        requirements: layers, dtype, device and block size to serve.
        engine: facts about the engine; ``engine.target`` is not ready to run yet.

    Returns:
        A `specdec.attention.AttentionBackend`; it must not allocate large buffers before `AttentionBackend.supports`
        was asked.

    Raises:
        SpecdecError: shown as it is when the backend was named by the user; with "auto" the backend is passed over.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def sampling_backend(engine: EngineContext) -> SamplingBackend | None:
    """Build what draws tokens from logits on a device.

    When called: once per engine, after the target is loaded. With ``sampling_backend = "auto"`` each installed backend
    is built and asked `SamplingBackend.supports`; of those that serve the device the one with the highest
    `SamplingBackend.priority` is taken, and all engines of the process use it on that device from then on.

    Args:
        engine: facts about the engine; ``engine.device`` is where the logits will be.

    Returns:
        A `specdec.sampling.backend.SamplingBackend`.

    Raises:
        SpecdecError: shown as it is when the backend was named by the user; with "auto" the backend is passed over.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def draft_head(checkpoint: Path, overrides: Mapping[str, Any], engine: EngineContext) -> DraftHead | None:
    """Build a draft head for the target's architecture.

    When called: once per engine, by a proposer that runs heads, after the target is loaded.

    Args:
        checkpoint: directory of the head's checkpoint.
        overrides: keys of the checkpoint's configuration that the user set otherwise.
        engine: facts about the engine; ``engine.target`` is loaded.

    Returns:
        A `specdec.drafting.DraftHead` with its weights.

    Raises:
        ModelLoadError: missing or surplus tensors, by name.
        PluginUnsuitableError: the head was made for another target; both sizes are named.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def config_class() -> type | None:
    """Return the attrs class of the plugin's own options.

    When called: while a configuration is validated; the module must import without torch.

    Returns:
        An attrs class. Its fields are the keys that the section ``speculative`` may carry beside the core's own
        (proposers), the keys of ``verifier_options`` (verifiers), or those of the table of the configuration file that
        belongs to a command. A class variable ``NOTICE``, one sentence, is what a user of the plugin must know;
        `specdec config` prints it. Fields with the metadata ``{"secret": True}`` are not shown there. A method
        ``check_plugins(registry)`` is called with each new instance, for options that name other plugins: it raises a
        `ConfigError` or `PluginError` where they are wrong, before any model is loaded.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def identify(checkpoint: Path) -> Identification | None:
    """Say whether a checkpoint directory belongs to this proposer.

    When called: only if ``speculative.model`` is set and ``speculative.method`` is not, for plugins whose shipped
    markers (``specdec_markers.toml`` beside the plugin's module) fit the checkpoint's ``config.json``. Without this
    hook fitting markers are enough.

    Args:
        checkpoint: directory with a ``config.json``.

    Returns:
        An `Identification`, or None.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def grammar(config: Any, engine: EngineContext) -> GrammarBackend | None:
    """Build a grammar backend for structured output (`SamplingParams.structured_outputs`).

    When called: once per engine. With ``grammar_backend = "auto"`` when the first request asks for structured output,
    on the thread that adds it; when the user named the backend, while the engine starts.

    Args:
        config: instance of the plugin's `config_class`, or an empty mapping.
        engine: facts about the engine; ``engine.tokenizer`` is None when the model has none, and
            ``engine.target_info.eos_token_ids`` are the tokens that end an output.

    Returns:
        A `specdec.grammar.GrammarBackend`. Its `compile` is called from any thread; the matchers it gives live on the
        engine's thread.

    Raises:
        SpecdecError: the backend cannot serve this model, for example without a tokenizer.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def logits_processor(config: Any, engine: EngineContext) -> LogitsProcessor | None:
    """Build a logits processor, which changes the logits of some requests before a token is chosen.

    When called: once per engine for each name in ``logits_processors``, after the target is loaded.

    Args:
        config: instance of the plugin's `config_class`, made from ``logits_processor_options.<name>``; or an empty
            mapping.
        engine: facts about the engine; read-only.

    Returns:
        A `specdec.sampling.processor.LogitsProcessor`. When one of its methods raises in a step, the requests it
        applies to fail with a message that names the plugin's distribution and version, and others go on.

    Raises:
        SpecdecError: shown as it is; the engine does not start.

    Compatibility: since 0.1.
    """


@hookspec(firstresult=True)
def stat_logger(config: Any, engine: EngineContext) -> StatLogger | None:
    """Build a consumer of step statistics.

    When called: once per engine for each logger named in ``stat_loggers``.

    Args:
        config: instance of the plugin's `config_class`, or an empty mapping.
        engine: facts about the engine; read-only.

    Returns:
        A `specdec.metrics.StatLogger`.

    Compatibility: since 0.1.
    """


@hookspec
def add_command(cli: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add a subcommand to the ``specdec`` command line.

    When called: only when the subcommand's name is typed, or for ``specdec --help``; must import nothing heavy. A name
    with a dot is typed as two words: ``bench.serve`` is ``specdec bench serve``.

    Args:
        cli: the subparsers object; call ``add_parser`` once with the entry point's name and set ``run`` as a default, a
            function that takes the parsed arguments and returns the exit code.

    Compatibility: since 0.1.
    """
