"""The boundary between a proposer and the engine: nothing a plugin returns is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.engine.request import NO_DRAFT, RequestDraft
from specdec.errors import PluginContractError
from specdec.types import Draft

if TYPE_CHECKING:
    from specdec.types import ProposerCapabilities


def split_draft(
    draft: object, max_draft_tokens: np.ndarray, vocab_size: int, capabilities: ProposerCapabilities
) -> list[RequestDraft]:
    """Check what a proposer returned and split it by request.

    Raises:
        PluginContractError: the value is not a `Draft`, or a shape, dtype, count, id, parent or probability is wrong.
    """
    if not isinstance(draft, Draft):
        raise PluginContractError(f"propose() returned {type(draft).__name__}, not a specdec.types.Draft")
    counts = _integers("num_draft_tokens", draft.num_draft_tokens, len(max_draft_tokens))
    tokens = _integers("token_ids", draft.token_ids, None)
    limits = max_draft_tokens.tolist()
    if not all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
        raise PluginContractError(f"num_draft_tokens {counts} must lie between 0 and max_draft_tokens {limits}")
    if sum(counts) != len(tokens):
        raise PluginContractError(f"num_draft_tokens sums to {sum(counts)}, but there are {len(tokens)} token_ids")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise PluginContractError(
            f"token_ids from {min(tokens)} to {max(tokens)} leave the vocabulary 0..{vocab_size - 1}"
        )
    parents = _checked_parents(draft, counts, capabilities)
    probs = _checked_probs(draft, len(tokens), vocab_size)
    return _split(tokens, counts, parents, probs)


def _integers(name: str, value: object, length: int | None) -> list[int]:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise PluginContractError(f"{name} must be a one-dimensional integer tensor, not {_describe(value)}")
    if length is not None and len(value) != length:
        raise PluginContractError(f"{name} has {len(value)} entries for {length} requests")
    numbers: list[int] = value.tolist()
    return numbers


def _checked_parents(draft: Draft, counts: list[int], capabilities: ProposerCapabilities) -> list[int] | None:
    if draft.parents is None:
        return None
    if not capabilities.trees:
        raise PluginContractError("the draft has parents, but the proposer's capabilities do not declare trees")
    parents = _integers("parents", draft.parents, sum(counts))
    found, lengths = np.array(parents, dtype=np.int64), np.array(counts, dtype=np.int64)
    index = np.arange(len(found)) - np.repeat(lengths.cumsum() - lengths, lengths)
    if ((found < -1) | (found >= index)).any():
        raise PluginContractError("parents must be -1 or an earlier node of the same request")
    return parents


def _checked_probs(draft: Draft, num_tokens: int, vocab_size: int) -> torch.Tensor | None:
    probs = draft.draft_probs
    if probs is None:
        return None
    if not isinstance(probs, torch.Tensor) or probs.shape != (num_tokens, vocab_size) or not probs.is_floating_point():
        raise PluginContractError(f"draft_probs must be float [{num_tokens}, {vocab_size}], not {_describe(probs)}")
    sums = probs.sum(dim=-1, dtype=torch.float32)
    if num_tokens and not bool(((sums - 1).abs() < 1e-2).all() & (probs >= 0).all()):
        raise PluginContractError("draft_probs must be finite, not negative, and sum to 1 in every row")
    return probs


def _split(
    tokens: list[int], counts: list[int], parents: list[int] | None, probs: torch.Tensor | None
) -> list[RequestDraft]:
    drafts = []
    start = 0
    for count in counts:
        end = start + count
        if count == 0:
            drafts.append(NO_DRAFT)
        else:
            drafts.append(
                RequestDraft(
                    tokens[start:end],
                    None if parents is None else parents[start:end],
                    None if probs is None else probs[start:end],
                )
            )
        start = end
    return drafts


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
