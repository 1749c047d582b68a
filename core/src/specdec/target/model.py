"""The target model: a transformers causal language model over packed tokens and the paged KV cache.

What happens when a target is made, in this order: the model's own attention gives the logits of two short sequences;
the attention layers are traced and checked against them; fusion passes replace what they can, and the result is checked
once more. Comparisons with the model's own logits that came out well are not repeated (`specdec.target.passed`).
"""

from __future__ import annotations

import ctypes
import gc
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from specdec.attention.interface import AttentionBackend, KVCache, KVGeometry
from specdec.attention.paged import allocate_kv_cache, kv_bytes_per_token
from specdec.errors import UnsupportedModelError
from specdec.sampling.model_defaults import model_defaults
from specdec.target import bridge
from specdec.target.cache import cache_root
from specdec.target.compiler import without_compiler
from specdec.target.forward import Forward, ModuleForward, StackForward, check_taps
from specdec.target.gguf import converted
from specdec.target.loading import GGUF_DTYPE, choose_device, load_config, load_model, own_linears
from specdec.target.parts import ModelParts, text_part
from specdec.target.passed import Passed
from specdec.target.resolve import resolve_model
from specdec.target.support import architecture_reasons, refuse
from specdec.target.tokenizer import eos_token_ids, load_tokenizer
from specdec.target.trace import Trace, check_packed, own_logits, trace
from specdec.types import AttentionRequirements, Needs, TargetInfo, TargetOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from specdec.config import EngineConfig
    from specdec.target.fused_stack import FusedStack
    from specdec.types import PackedBatch

logger = logging.getLogger(__name__)


@frozen(eq=False, kw_only=True)
class FoundTarget:
    """A target's files and configuration, before its weights are read."""

    path: Path
    """The checkpoint directory; of a GGUF file the converted one."""
    dtype: str
    """'auto' or a key of `specdec.target.loading.DTYPES`: what to load the weights as."""
    device: torch.device
    hf_config: Any
    """The transformers configuration of the whole model."""
    info: TargetInfo
    """As far as the configuration tells."""

    @property
    def dtype_name(self) -> str:
        """The dtype that weights will have; float32 where neither the user nor the configuration says."""
        stored = getattr(self.hf_config, "dtype", None) or torch.float32
        return str(stored).removeprefix("torch.") if self.dtype == "auto" else self.dtype


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let no garbage collector run: what importing and loading make is nearly all kept, so a dozen rounds through it
    would find nothing. A collection that is asked for does not look at what was there before."""
    enabled, may_freeze = gc.isenabled(), not gc.get_freeze_count()  # the user's own frozen objects stay so
    gc.disable()
    if may_freeze:
        gc.freeze()
    try:
        yield
    finally:
        if may_freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


@_without_collections()
def find_target(config: EngineConfig, check: Callable[[str, Path], None] | None = None) -> FoundTarget:
    """Find the target an engine configuration names and read its configuration; a GGUF file is converted.

    Args:
        config: the engine's.
        check: called with the name and the directory before anything in it is read, to refuse it.

    Raises:
        ModelNotFoundError: nothing under this name.
        ModelLoadError: a file is truncated or unreadable.
        UnsupportedModelError: transformers does not know the architecture.
        ConfigError: the device is not there.
    """
    device = choose_device(config.device)
    found = resolve_model(config.model, config.cache_dir, trust_remote_code=config.trust_remote_code)
    path, dtype = found.path, str(config.dtype)
    if found.kind == "gguf":
        dtype = GGUF_DTYPE if dtype == "auto" else dtype
        path = converted(path, dtype, cache_root(config.cache_dir))
    elif check is not None:
        check(config.model, path)
    hf_config = load_config(config.model, path, trust_remote_code=config.trust_remote_code)
    text = hf_config.get_text_config()
    info = target_info(config.model, path, text, vocab_size=getattr(text, "vocab_size", 0))
    return FoundTarget(path=path, dtype=dtype, device=device, hf_config=hf_config, info=info)


@_without_collections()
@without_compiler()
def load_target(config: EngineConfig, found: FoundTarget | None = None) -> TargetModel:
    """Load, check and fuse the target an engine configuration names.

    Args:
        config: the engine's.
        found: from `find_target`; None finds it now.

    Raises:
        ModelNotFoundError: nothing under this name.
        ModelLoadError: files are truncated, unreadable or incomplete.
        UnsupportedModelError: the architecture cannot be a target; all reasons are listed.
        ConfigError: the device is not there.
    """
    found = found or find_target(config)
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(found.path, config.tokenizer, cache_dir=config.cache_dir, trust_remote_code=trust)
    target = TargetModel.from_model(
        load_model(
            config.model, found.path, found.hf_config, dtype=found.dtype, device=found.device, trust_remote_code=trust
        ),
        name=config.model,
        path=found.path,
        tokenizer=tokenizer,
        fuse=config.fuse,
        cache=cache_root(config.cache_dir),
    )
    own_linears(target.model)
    _give_back_memory()
    return target


def _give_back_memory() -> None:
    """Return what loading freed to the system: glibc keeps tens of megabytes of it otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class TargetModel:
    """Runs packed batches through the target; see the module's docstring."""

    def __init__(
        self,
        parts: ModelParts,
        traced: Trace,
        info: TargetInfo,
        tokenizer: Any,
        *,
        weight_bytes: int,
        stack: FusedStack | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Hold a checked model; use `from_model` or `load_target` to make one."""
        self.info = info
        self.tokenizer = tokenizer
        self.device: torch.device = parts.device
        self.dtype: torch.dtype = parts.dtype
        self.model = parts.model
        """The transformers model, possibly with fused modules in place of some of its own."""
        self.weight_bytes = weight_bytes
        """Bytes of the model's parameters and buffers."""
        self.sampling_defaults: Mapping[str, Any] = sampling_defaults or {}
        """What the model's authors set of `SamplingParams`."""
        self._parts = parts
        self._trace = traced
        self._stack = stack
        self._forward: Forward | None = None
        self._backend: AttentionBackend | None = None
        self._cache: KVCache | None = None

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        name: str,
        path: Path | None = None,
        tokenizer: Any = None,
        fuse: bool = True,
        cache: Path | None = None,
    ) -> TargetModel:
        """Make a target of a transformers model in memory; the model is changed in place.

        Args:
            model: a causal language model, or a multimodal model that holds one; in evaluation mode.
            name: as the user named it.
            path: its checkpoint directory, when there is one.
            tokenizer: its tokenizer, when there is one.
            fuse: replace modules by faster ones where that is proven to give the same results.
            cache: the cache directory, to remember in it that the checkpoint's model passed its checks.

        Raises:
            UnsupportedModelError: it cannot be a target; all reasons are listed.
        """
        bridge.register()
        generation_config = getattr(model, "generation_config", None)
        parts = text_part(model)
        del model  # towers of other modalities go with it
        config = parts.config
        weight_bytes = sum(tensor.nbytes for tensor in (*parts.model.parameters(), *parts.model.buffers()))
        reasons = architecture_reasons(config, type(parts.model))
        if reasons:
            raise refuse(name, config.model_type, reasons)
        max_positions = max_position_embeddings(config)
        passed = Passed.of(parts, path, cache, fuse=fuse)
        try:
            own = None if passed.before else own_logits(parts.model, config, parts.device)
            traced = trace(parts.model, parts.logits, config, max_positions)
            reasons = list(traced.reasons)
            if own is not None and not reasons:
                reasons = check_packed(traced, parts.logits, config, own)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            reasons = [f"a forward pass over a few tokens fails: {type(error).__name__}: {error}"]
            raise refuse(name, config.model_type, reasons) from error
        if reasons:
            raise refuse(name, config.model_type, reasons)
        stack = _fuse(parts, traced, own, name) if fuse else None
        passed.remember()
        ends = eos_token_ids(generation_config, config, tokenizer)
        info = target_info(name, path, config, vocab_size=traced.vocab_size, eos_token_ids=ends)
        defaults = model_defaults(generation_config, name)
        return cls(parts, traced, info, tokenizer, weight_bytes=weight_bytes, stack=stack, sampling_defaults=defaults)

    def requirements(self, block_size: int, trees: bool = False) -> AttentionRequirements:
        """What an attention backend must be able to do for this target."""
        return AttentionRequirements(
            layers=self._trace.layers,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device.type,
            block_size=block_size,
            trees=trees,
        )

    def kv_bytes_per_token(self) -> int:
        """Bytes of K/V that one token takes over all layers."""
        return kv_bytes_per_token(self._trace.layers, self.dtype)

    @property
    def kv_geometry(self) -> KVGeometry:
        """Blocks and block size of the bound cache, for layers that share its block tables.

        Raises:
            RuntimeError: before `bind`.
        """
        if self._cache is None:
            raise RuntimeError("TargetModel.kv_geometry before bind")
        return KVGeometry(self._cache.num_blocks, self._cache.block_size)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Make the paged cache, all zeros; on the CPU pages cost memory only once they are written."""
        return allocate_kv_cache(self._trace.layers, self.dtype, self.device, KVGeometry(num_blocks, block_size))

    def bind(self, backend: AttentionBackend, cache: KVCache, needs: Needs) -> None:
        """Set what forward passes use, and tap the hidden states that ``needs`` asks for.

        Raises:
            UnsupportedModelError: ``needs`` names layers that do not exist.
        """
        check_taps(needs, len(self._parts.layers))
        if self._forward is not None:
            self._forward.close()
        stack, parts = self._stack, self._parts
        self._forward = ModuleForward(parts, needs) if stack is None else StackForward(stack, needs)
        self._backend = backend
        self._cache = cache

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> TargetOutput:
        """Run a packed batch: write its K/V, return logits of ``batch.logits_indices`` and tapped hidden states."""
        if self._forward is None or self._backend is None or self._cache is None:
            raise RuntimeError("TargetModel.forward before bind")
        traced = self._trace
        context = bridge.StepContext(
            self._backend,
            self._backend.plan(batch, self._cache),
            traced.layers,
            traced.index_of,
            traced.query_scales,
            batch.positions,
        )
        with bridge.using(context):
            return self._forward(batch.input_ids, batch.positions, batch.logits_indices)


def target_info(
    name: str, path: Path | None, config: Any, *, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> TargetInfo:
    """The facts in a transformers configuration of a text part; 0 for what it does not say."""
    return TargetInfo(
        model=name,
        model_type=config.model_type,
        path=path,
        hf_config=config,
        vocab_size=vocab_size,
        hidden_size=getattr(config, "hidden_size", 0),
        num_layers=getattr(config, "num_hidden_layers", 0),
        max_position_embeddings=max_position_embeddings(config),
        eos_token_ids=eos_token_ids,
    )


def max_position_embeddings(config: Any) -> int:
    """The number of positions a model was made for; 2**20 when its configuration sets no bound."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20


def _fuse(parts: ModelParts, traced: Trace, own: tuple[Tensor, Tensor] | None, name: str) -> FusedStack | None:
    """Run the fusion passes, then compare what will run with the model's ``own`` logits, unless that was done before.

    Returns:
        The stack when everything fused; it gives the logits of the fused modules.
    """
    from specdec.target.fusion import fuse

    with bridge.using(bridge.ReferenceContext(traced.layers, traced.index_of, traced.query_scales)):
        done = fuse(parts.model)
        stack = _stack(parts)
    logger.debug("%s: fused %s; stack: %s", name, ", ".join(done) or "nothing", stack is not None)
    if own is None:
        return stack

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return parts.logits(ids, positions) if stack is None else stack(ids, positions, torch.arange(len(ids)))[0]

    reasons = check_packed(traced, forward, parts.config, own)
    if reasons:
        raise UnsupportedModelError(
            f"{name!r}: fused modules give other results than the model's own ({reasons[0]}); set fuse = false",
            reasons=reasons,
        )
    return stack


def _stack(parts: ModelParts) -> FusedStack | None:
    if parts.device.type != "cpu":
        return None
    from specdec.target.fused_stack import FusedStack

    return FusedStack.build(parts.model)
