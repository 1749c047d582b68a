"""The draft model on its own: loading, checking it against the target, forward passes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from specdec.config import EngineConfig
from specdec.drafting.kit import MASK_TOKEN_KEYS, DraftSampler, draft_backend
from specdec.errors import ConfigError, ModelNameError, SpecdecError
from specdec.target.model import FoundTarget, TargetModel, find_target, load_target
from specdec.target.tokenizer import load_tokenizer
from specdec.types import Needs, ProposerCapabilities
from specdec_draft_model.vocabulary import VocabularyMap, check_same_tokens, same_ids, shared_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from specdec.attention.interface import KVCache, KVGeometry
    from specdec.types import EngineContext, PackedBatch, TargetInfo
    from specdec_draft_model.config import DraftModelConfig


class Drafter:
    """A causal language model over its own K/V in the target's blocks."""

    def __init__(
        self,
        model: TargetModel,
        vocabulary: VocabularyMap,
        *,
        max_model_len: int,
        mask_token_id: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Hold a loaded model; use `loaded`.

        Args:
            model: the draft model.
            vocabulary: from the target's ids to its own and back.
            max_model_len: positions it can be used for.
            mask_token_id: what stands for a token to be drafted in parallel; None: one token per pass.
            num_threads: CPU threads of its passes; None: as many as torch has.
        """
        self.model = model
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.mask_token_id = mask_token_id
        self.cache: KVCache | None = None
        """The draft K/V, once bound."""
        self._num_threads = num_threads

    @classmethod
    def loaded(cls, config: DraftModelConfig, engine: EngineContext) -> Drafter:
        """Load the model that the options name, as targets are loaded, and check it against the target.

        Raises:
            ConfigError: it cannot be loaded or used as a drafter, tokenizers differ, or an option does not fit it.
        """
        with _about_the_drafter(config):
            model = load_target(_settings(config, engine))
        return cls(
            model,
            _vocabulary(config, engine, model),
            max_model_len=config.max_model_len or model.info.max_position_embeddings,
            mask_token_id=_mask_token(config, model.info),
            num_threads=config.draft_num_threads,
        )

    def bind(self, engine: EngineContext, geometry: KVGeometry) -> None:
        """Choose an attention backend and allocate K/V of the same number and size of blocks as the target's."""
        backend = draft_backend(engine, self.model.requirements(geometry.block_size))
        self.cache = self.model.allocate_kv_cache(geometry.num_blocks, geometry.block_size)
        self.model.bind(backend, self.cache, Needs())

    def forward(self, batch: PackedBatch) -> Tensor:
        """Run a batch of draft ids; logits [R, tokens that may be drafted] of ``batch.logits_indices``."""
        with _threads(self._num_threads):
            return self.vocabulary.logits(self.model.forward(batch).logits)

    def memory(self) -> Mapping[str, int]:
        """Bytes of weights and K/V."""
        layers = () if self.cache is None else self.cache.layers
        return {
            "draft_weights": self.model.weight_bytes,
            "draft_kv": sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        }


def check(config: DraftModelConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the model that the options name can draft as they say, before the target or it is loaded.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: it cannot be used as a drafter, or an option does not fit it.
    """

    def is_a_model(_: str, directory: Path) -> None:
        if engine.registry is not None:
            engine.registry.check_method("draft_model", directory)

    with _about_the_drafter(config):
        found = find_target(_settings(config, engine), is_a_model)
        info = found.info
    _check_tokenizers(config, engine, found)
    limit = info.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"speculative.max_model_len is {config.max_model_len}, but the drafter {config.model!r} has {limit} "
            "positions",
            path="speculative.max_model_len",
        )
    _mask_token(config, info)
    return ProposerCapabilities(draft_probs=DraftSampler(config.draft_sample_method).needs_probs)


def _check_tokenizers(config: DraftModelConfig, engine: EngineContext, found: FoundTarget) -> None:
    """Refuse another tokenizer than the target's where the vocabularies' sizes give cause to look before loading."""
    target = engine.target_info
    if config.use_heterogeneous_vocab or target.path is None or target.vocab_size == found.info.vocab_size:
        return
    trust, cache_dir = bool(engine.settings.get("trust_remote_code")), engine.settings.get("cache_dir")
    ours = load_tokenizer(target.path, engine.settings.get("tokenizer"), cache_dir=cache_dir, trust_remote_code=trust)
    theirs = load_tokenizer(found.path, trust_remote_code=trust)
    if ours is not None and theirs is not None:
        check_same_tokens(ours, theirs, target.vocab_size, found.info.vocab_size)


@contextmanager
def _about_the_drafter(config: DraftModelConfig) -> Iterator[None]:
    """What is said inside about a target is said about the drafter."""
    try:
        yield
    except ModelNameError as error:
        raise error.moved("speculative.model") from error
    except ConfigError as error:
        if error.path == "speculative.model":
            raise
        raise _cannot_draft(config, error) from error
    except SpecdecError as error:
        raise _cannot_draft(config, error) from error


def _cannot_draft(config: DraftModelConfig, error: SpecdecError) -> ConfigError:
    return ConfigError(f"speculative.model: {config.model!r} cannot draft: {error}", path="speculative.model")


def _settings(config: DraftModelConfig, engine: EngineContext) -> EngineConfig:
    """The drafter's configuration as if it were a target; what the options leave open is as for the target."""
    own: dict[str, Any] = {
        "model": config.model,
        "dtype": config.draft_dtype or engine.dtype,
        "device": config.draft_device or _device(engine),
    }
    shared = {
        name: engine.settings[name] for name in ("trust_remote_code", "cache_dir", "fuse") if name in engine.settings
    }
    return EngineConfig(**own, **shared)


def _device(engine: EngineContext) -> str:
    return engine.device if engine.target is None else str(engine.target.device)


def _vocabulary(config: DraftModelConfig, engine: EngineContext, model: TargetModel) -> VocabularyMap:
    widths = engine.target_info.vocab_size, model.info.vocab_size
    if config.use_heterogeneous_vocab:
        return shared_tokens(engine.tokenizer, model.tokenizer, *widths, model.device)
    check_same_tokens(engine.tokenizer, model.tokenizer, *widths)
    return same_ids(*widths, model.tokenizer)


def _mask_token(config: DraftModelConfig, info: TargetInfo) -> int | None:
    """The mask id when drafts are made in parallel."""
    masks = [value for key in MASK_TOKEN_KEYS if (value := getattr(info.hf_config, key, None)) is not None]
    if config.parallel_drafting is False or (config.parallel_drafting is None and not masks):
        return None
    if not masks:
        raise ConfigError(
            f"speculative.parallel_drafting is on, but the drafter {config.model!r} was not trained for it: its "
            f"config.json has no {' or '.join(MASK_TOKEN_KEYS)}; leave parallel_drafting out",
            path="speculative.parallel_drafting",
        )
    mask = masks[0]
    if not isinstance(mask, int) or not 0 <= mask < info.vocab_size:
        raise ConfigError(
            f"speculative.model: the mask id {mask!r} in config.json of {config.model!r} lies outside its vocabulary "
            f"of {info.vocab_size} ids",
            path="speculative.model",
        )
    return mask


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch and the compiled kernels use ``count`` threads inside."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
