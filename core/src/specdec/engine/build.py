"""Puts an engine together from its configuration."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

from specdec.config import format_size, parse_size
from specdec.engine.kv_cache import KVCacheManager
from specdec.engine.plugins import make_constraints
from specdec.engine.scheduler import Scheduler
from specdec.errors import (
    CapacityError,
    ConfigError,
    DraftLengthError,
    PluginContractError,
    PluginUnsuitableError,
    SpecdecError,
)
from specdec.registry import Registry
from specdec.registry.selection import AUTO, select_plugins
from specdec.runner.batch import BatchBuilder
from specdec.runner.commit import Committer
from specdec.runner.drafting import Drafting
from specdec.runner.verification import Verification
from specdec.sampling.logprobs import LogprobsComputer
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.sampler import use_backend, warm_up
from specdec.types import AttentionRequirements, EngineContext, Needs, ProposerCapabilities
from specdec.wording import cause_of

if TYPE_CHECKING:
    import torch

    from specdec.config import EngineConfig, SpeculativeConfig
    from specdec.control import Control
    from specdec.drafting.base import Proposer
    from specdec.engine.constraints import Constraints
    from specdec.metrics.loggers import StatLogger
    from specdec.registry.selection import Selection
    from specdec.target.model import FoundTarget, TargetModel
    from specdec.verify.base import Verifier

logger = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Parts:
    """Everything an `EngineCore` runs."""

    config: EngineConfig
    context: EngineContext
    target: TargetModel
    scheduler: Scheduler
    builder: BatchBuilder
    verification: Verification
    committer: Committer
    drafting: Drafting | None
    stat_loggers: tuple[StatLogger, ...]
    constraints: Constraints


@attrs.frozen(eq=False)
class _Checked:
    """What is known of an engine before weights are read."""

    registry: Registry
    selection: Selection
    found: FoundTarget
    context: EngineContext
    verifier: Verifier
    label: str
    """The proposer, for messages."""


def check(config: EngineConfig, proposer: Proposer | None = None) -> None:
    """Refuse what can be refused before weights are read; `build` begins with the same.

    Raises:
        SpecdecError: a name, an option, a checkpoint's configuration or a limit is wrong.
    """
    _checked(config, proposer)


def _checked(config: EngineConfig, proposer: Proposer | None) -> _Checked:
    from specdec.target.model import find_target

    if proposer is not None:
        _check_object(proposer)
    registry = Registry(config.plugins)
    selection = select_plugins(config, registry, _method(config, registry) if proposer is None else None)
    found = find_target(config, registry.check_target)
    context = _context(config, registry, found)
    verifier: Verifier = registry.create(
        "verifier", config.verifier, "verify", config=selection.verifier.options, engine=context
    )
    method = selection.method
    label = f"proposer {type(proposer).__name__}" if method is None else registry.describe("proposer", method.name)
    if method is not None:
        drafts = registry.check(method.name, method.options, context)
        if drafts is not None:
            assert config.speculative is not None  # it names the method
            _check_pair(drafts, label, verifier)
            _draft_length(config.speculative, drafts, label)
    _check_backends(config, registry, context)
    return _Checked(registry, selection, found, context, verifier, label)


def _check_backends(config: EngineConfig, registry: Registry, context: EngineContext) -> None:
    """Refuse backends that are named and cannot run here, whatever the target's layers are."""
    if config.sampling_backend != AUTO:
        registry.sampling_backend(context, config.sampling_backend)
    if config.attention_backend != AUTO:
        requirements = AttentionRequirements(
            layers=(), dtype=context.dtype, device=context.device, block_size=config.block_size
        )
        with suppress(PluginContractError):  # one that needs layers to answer is asked again when they are known
            registry.attention_backends(requirements, context, wanted=config.attention_backend)


def build(config: EngineConfig, proposer: Proposer | None = None) -> Parts:
    """Load the target, select the plugins and size the KV cache.

    Args:
        config: validated configuration.
        proposer: an object to draft with instead of one made by ``config.speculative.method``;
            ``config.speculative`` still says how many tokens it may draft.

    Raises:
        SpecdecError: a name, a checkpoint or a limit is wrong; nothing is left behind.
    """
    import torch

    from specdec.cpu.library import keep_in
    from specdec.target.model import load_target

    keep_in(config.cache_dir)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    checked = _checked(config, proposer)
    registry, selection, context, verifier = checked.registry, checked.selection, checked.context, checked.verifier
    method, label = selection.method, checked.label
    target = load_target(config, checked.found)
    bytes_per_token = target.kv_bytes_per_token()
    context = _loaded(context, target, _max_model_len(config, target, bytes_per_token))
    if method is not None:
        proposer = registry.create("proposer", method.name, "propose", config=method.options, engine=context)
    if proposer is not None:
        _check_declarations(proposer, label)
        _check_pair(proposer.capabilities, label, verifier)
        if config.speculative is not None:
            k = _draft_length(config.speculative, proposer.capabilities, label)
            config = attrs.evolve(config, speculative=attrs.evolve(config.speculative, num_speculative_tokens=k))
            context = attrs.evolve(context, num_speculative_tokens=k, settings=attrs.asdict(config))
        if own_bytes := proposer.kv_bytes_per_token():
            bytes_per_token += own_bytes
            context = attrs.evolve(context, max_model_len=_max_model_len(config, target, bytes_per_token))
    num_blocks = _num_blocks(config, bytes_per_token)
    needs = Needs() if proposer is None else proposer.needs
    trees = proposer is not None and proposer.capabilities.trees
    requirements = target.requirements(config.block_size, trees=trees)
    backend = registry.attention_backends(requirements, context, wanted=config.attention_backend)
    cache = target.allocate_kv_cache(num_blocks, config.block_size)
    target.bind(backend, cache, needs)
    use_backend(target.device.type, registry.sampling_backend(context, config.sampling_backend))
    warm_up(target.device)
    if proposer is not None:
        _load(proposer, target, label)
    constraints = make_constraints(config, selection, registry, context, proposer)
    pipeline = LogitsPipeline(target.info.vocab_size, target.device, constraints.processors)
    kv_cache = KVCacheManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        next_token=needs.next_token,
    )
    described = label if proposer is not None else None
    logger.info("%s", _summary(config, context, backend.name, described, num_blocks, verifier))
    _warn_of_lossy(verifier, registry.describe("verifier", config.verifier))
    return Parts(
        config=config,
        context=context,
        target=target,
        scheduler=Scheduler(
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_lookahead_slots=needs.lookahead_slots,
            max_model_len=context.max_model_len,
        ),
        builder=BatchBuilder(
            max_num_seqs=config.max_num_seqs,
            max_model_len=context.max_model_len,
            block_size=config.block_size,
            device=target.device,
            num_lookahead_slots=needs.lookahead_slots,
        ),
        verification=Verification(pipeline, verifier, target.device),
        committer=Committer(
            kv_cache,
            LogprobsComputer(config.logprobs_mode, target.tokenizer),
            cache,
            pipeline.faults,
            pipeline.processors_of,
            registry.describe("verifier", config.verifier),
        ),
        constraints=constraints,
        drafting=None
        if proposer is None
        else _drafting(config, context, proposer, method.name if method else _given_name(config), label),
        stat_loggers=tuple(
            registry.create("stat_logger", chosen.name, "stat_logger", config=chosen.options, engine=context)
            for chosen in selection.stat_loggers
        ),
    )


def _method(config: EngineConfig, registry: Registry) -> str | None:
    """The proposer's name, as given or as the checkpoint tells; None without speculation."""
    speculative = config.speculative
    if speculative is None or speculative.method is not None:
        return None if speculative is None else speculative.method
    from specdec.target.resolve import resolve_model

    assert speculative.model is not None  # `SpeculativeConfig` asks for one of the two
    found = registry.identify(resolve_model(speculative.model, config.cache_dir, option="speculative.model").path)
    logger.info("speculative.method is %r: %s", found.method, found.reason)
    return found.method


def _context(config: EngineConfig, registry: Registry, found: FoundTarget) -> EngineContext:
    """What is known before the target is loaded.

    Raises:
        ConfigError: ``max_model_len`` is more than the target has positions.
        CapacityError: ``kv_cache_memory`` is more than the machine has.
    """
    _check_memory(config, found.device)
    limit = found.info.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model {config.model!r} has {limit} positions",
            path="max_model_len",
        )
    return EngineContext(
        target_info=found.info,
        device=found.device.type,
        dtype=found.dtype_name,
        max_model_len=config.max_model_len or limit,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=config.speculative.most_draft_tokens if config.speculative else 0,
        block_size=config.block_size,
        seed=config.seed,
        settings=attrs.asdict(config),
        registry=registry,
    )


def _loaded(context: EngineContext, target: TargetModel, max_model_len: int) -> EngineContext:
    """The same with the target."""
    return attrs.evolve(
        context,
        target_info=target.info,
        dtype=str(target.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        target=target,
        tokenizer=target.tokenizer,
    )


def _check_memory(config: EngineConfig, device: torch.device) -> None:
    """Refuse more K/V than the machine has memory."""
    wanted = parse_size(config.kv_cache_memory)
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if wanted > memory:
            raise CapacityError(
                f"kv_cache_memory {format_size(wanted)} is more than this machine's memory, {format_size(memory)}"
            )


def _num_blocks(config: EngineConfig, bytes_per_token: int) -> int:
    """How many blocks ``kv_cache_memory`` pays for."""
    return parse_size(config.kv_cache_memory) // (bytes_per_token * config.block_size)


def _max_model_len(config: EngineConfig, target: TargetModel, bytes_per_token: int) -> int:
    """The longest sequence that the model and the KV cache both hold."""
    fits = _num_blocks(config, bytes_per_token) * config.block_size
    limit = target.info.max_position_embeddings
    wanted = config.max_model_len or limit
    if fits >= wanted:
        return wanted
    memory = format_size(parse_size(config.kv_cache_memory))
    mebibytes = -(-(wanted + config.block_size) * bytes_per_token // 2**20)
    if config.max_model_len is not None or fits < 2:
        raise CapacityError(
            f"kv_cache_memory {memory} holds {max(fits, 0)} tokens, too few for one request of max_model_len "
            f"{wanted}: raise kv_cache_memory to {mebibytes}MiB or lower max_model_len"
        )
    logger.warning(
        "max_model_len is lowered from the model's %d to the %d tokens that kv_cache_memory %s holds",
        limit,
        fits,
        memory,
    )
    return fits


def _check_object(proposer: object) -> None:
    """Refuse what a program gave as ``proposer`` and is none, before anything is loaded."""
    from specdec.drafting.base import Proposer

    if isinstance(proposer, Proposer):
        return
    if isinstance(proposer, type):
        name = proposer.__name__
        raise PluginContractError(f"proposer is the class {name}, where an object of it is needed: proposer={name}(…)")
    raise PluginContractError(
        f"proposer is of the type {type(proposer).__name__}, which is not derived from specdec.drafting.Proposer; an "
        'installed method is named in speculative_config={"method": …}'
    )


def _check_declarations(proposer: Proposer, label: str) -> None:
    """Refuse a proposer whose declarations are of other types."""
    for name, value, wanted in (
        ("needs", proposer.needs, Needs),
        ("capabilities", proposer.capabilities, ProposerCapabilities),
    ):
        if not isinstance(value, wanted):
            raise PluginContractError(
                f"{name} of the {label} is of the type {type(value).__name__}, where a specdec.types.{wanted.__name__} "
                "is required",
                kind="proposer",
            )


def _load(proposer: Proposer, target: TargetModel, label: str) -> None:
    """Let a proposer load what it needs; whatever it raises names it."""
    try:
        proposer.load(target)
    except SpecdecError:
        raise
    except Exception as error:
        raise PluginContractError(f"load() of the {label} raised {cause_of(error)}", kind="proposer") from error


def _check_pair(drafts: ProposerCapabilities, label: str, verifier: Verifier) -> None:
    """Refuse a proposer whose drafts the verifier does not take."""
    if drafts.trees and not verifier.accepts_trees:
        raise PluginUnsuitableError(
            f"the {label} drafts trees, which the verifier {verifier.name!r} does not take: choose another verifier, "
            "such as 'match'",
            kind="verifier",
            name=verifier.name,
        )
    if verifier.needs_draft_probs and not drafts.draft_probs:
        raise PluginUnsuitableError(
            f"the verifier {verifier.name!r} needs draft probabilities, which the {label} does not give; use verifier "
            "'match'",
            kind="verifier",
            name=verifier.name,
        )


def _draft_length(speculative: SpeculativeConfig, drafts: ProposerCapabilities, label: str) -> int:
    """How many tokens are drafted; more than the proposer can draft are refused."""
    k, most = speculative.most_draft_tokens, drafts.max_draft_tokens
    if most is None or k <= most:
        return k
    if speculative.num_speculative_tokens is not None:
        raise DraftLengthError("speculative.num_speculative_tokens", k, label, most)
    return most


def _drafting(config: EngineConfig, context: EngineContext, proposer: Proposer, method: str, label: str) -> Drafting:
    return Drafting(
        proposer,
        label=label,
        method=method,
        num_speculative_tokens=context.num_speculative_tokens,
        control=_control(config, context, proposer),
        max_model_len=context.max_model_len,
        vocab_size=context.target_info.vocab_size,
        max_faults=config.max_proposer_faults,
        time_budget=config.proposer_time_budget,
    )


def _control(config: EngineConfig, context: EngineContext, proposer: Proposer) -> Control:
    """What decides the draft lengths."""
    from specdec.control import AdaptiveControl, FixedControl, Schedule

    k, settings = context.num_speculative_tokens, config.speculative
    by_batch_size = settings.num_speculative_tokens_per_batch_size if settings else None
    schedule = Schedule.parse(by_batch_size, k)
    if settings is None or settings.speculation == "always":
        return FixedControl(schedule)
    most_rows = context.max_num_seqs * (k + 1)
    return AdaptiveControl(
        schedule,
        k,
        most_rows=most_rows,
        drafts_every_step=proposer.needs.every_step,
        trees=proposer.capabilities.trees,
    )


def _given_name(config: EngineConfig) -> str:
    """What the configuration calls a proposer that was given as an object."""
    return (config.speculative.method if config.speculative else None) or "given"


def _warn_of_lossy(verifier: Verifier, label: str) -> None:
    """Say once, loudly enough for any log, that outputs are not the target's own."""
    if not verifier.lossless:
        worth = "outputs differ from the target's own"
        if verifier.benchmark_only:
            worth = "its output is for benchmarks only"
        logger.warning("%s is lossy: %s", label, worth)


def _summary(
    config: EngineConfig,
    context: EngineContext,
    backend: str,
    proposer: str | None,
    num_blocks: int,
    verifier: Verifier,
) -> str:
    """One line that says what runs, and whether speculation is on and how."""
    lossy = "" if verifier.lossless else " (lossy)"
    speculation = (
        f"on: {proposer}, k={context.num_speculative_tokens}, verifier {config.verifier}{lossy}" if proposer else "off"
    )
    return (
        f"model {config.model} ({context.dtype}, {context.device}), attention {backend}, "
        f"{num_blocks} KV blocks of {config.block_size}, max_model_len {context.max_model_len}; "
        f"speculation {speculation}"
    )
