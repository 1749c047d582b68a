"""Proposers and requests for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec import SamplingParams
from specdec.testing import engine_context
from specdec.types import Draft, ProposalInput, RequestInfo
from specdec_suffix.config import SuffixConfig
from specdec_suffix.suffix import SuffixProposer


def make(k: int = 4, depth: int = 24, factor: float = 1.0, least: float = 0.1, **options: Any) -> SuffixProposer:
    """A proposer; options of the store go by their short names."""
    config = SuffixConfig(
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=least,
        **({"suffix_stored_prompt_tokens": 0} | options),
    )
    return SuffixProposer(config, engine_context(num_speculative_tokens=k))


def start(proposer: SuffixProposer, request_id: str, prompt: Sequence[int], **extra_args: Any) -> None:
    sampling = SamplingParams(temperature=0, extra_args=extra_args)
    tokens = np.array(prompt, dtype=np.int64)
    proposer.start(RequestInfo(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, seed=0))


def ask(proposer: SuffixProposer, texts: dict[str, Sequence[int]], limits: Sequence[int] | int) -> Draft:
    limits = [limits] * len(texts) if isinstance(limits, int) else limits
    return proposer.propose(
        ProposalInput(
            request_ids=tuple(texts),
            token_ids=tuple(np.array(text, dtype=np.int64) for text in texts.values()),
            max_draft_tokens=np.array(limits, dtype=np.int32),
        )
    )


def draft(proposer: SuffixProposer, text: Sequence[int], limit: int = 4, request_id: str = "a") -> list[int]:
    return ask(proposer, {request_id: text}, limit).token_ids.tolist()


def respond(proposer: SuffixProposer, prompt: Sequence[int], response: Sequence[int], **extra_args: Any) -> None:
    """A whole request: started, drafted for once, and completed."""
    start(proposer, "whole", prompt, **extra_args)
    ask(proposer, {"whole": prompt}, 1)
    proposer.complete("whole", np.array([*prompt, *response], dtype=np.int64))
    proposer.finish("whole")
