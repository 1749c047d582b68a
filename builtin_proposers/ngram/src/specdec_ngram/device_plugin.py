"""The method `ngram_gpu` as a plugin; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.types import EngineContext
    from specdec_ngram.config import NgramConfig
    from specdec_ngram.device import NgramDeviceProposer


@hookimpl
def config_class() -> type:
    """Return the class of the method's own options."""
    from specdec_ngram.config import NgramConfig

    return NgramConfig


@hookimpl
def propose(config: NgramConfig, engine: EngineContext) -> NgramDeviceProposer:
    """Build the proposer."""
    from specdec_ngram.device import NgramDeviceProposer

    return NgramDeviceProposer(
        prompt_lookup_min=config.min_length,
        prompt_lookup_max=config.max_length,
        num_speculative_tokens=engine.num_speculative_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        device=engine.device,
    )
