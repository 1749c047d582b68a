"""The boundary between a verifier and the engine: what has another form than a verdict is never committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.errors import PluginContractError
from specdec.types import Verdict


def check_form(verdict: object, label: str) -> None:
    """Refuse what is no verdict, or has tensors of other types.

    Raises:
        PluginContractError: names the verifier.
    """
    if not isinstance(verdict, Verdict):
        raise PluginContractError(
            f"verify() of the {label} returned {type(verdict).__name__}, no specdec.types.Verdict"
        )
    for name, value, dims in (("token_ids", verdict.token_ids, 2), ("num_tokens", verdict.num_tokens, 1)):
        if not isinstance(value, torch.Tensor) or value.dim() != dims or value.dtype not in (torch.int32, torch.int64):
            raise PluginContractError(
                f"{name} of the verdict of the {label} must be a {dims}-dimensional integer tensor, not "
                f"{_describe(value)}"
            )


def check_runs(
    runs: Sequence[Sequence[int]],
    counts: Sequence[int],
    num_draft_tokens: Sequence[int],
    vocab_size: int,
    label: str,
) -> None:
    """Refuse runs that the drafts do not allow, and tokens that do not exist.

    Args:
        runs: `Verdict.token_ids`.
        counts: `Verdict.num_tokens`.
        num_draft_tokens: of each request, how many draft tokens were verified.
        vocab_size: width of the logits.
        label: the verifier with its distribution and version.

    Raises:
        PluginContractError: names the verifier.
    """
    if not len(runs) == len(counts) == len(num_draft_tokens):
        raise PluginContractError(
            f"the {label} decided on {len(runs)} rows of token_ids and {len(counts)} num_tokens for "
            f"{len(num_draft_tokens)} requests"
        )
    width = len(runs[0]) if runs else 0
    for count, drafted in zip(counts, num_draft_tokens, strict=True):
        if not 0 < count <= drafted + 1 or count > width:
            raise PluginContractError(
                f"the {label} gave {count} tokens, in a row of {width}, for a draft of {drafted}: a verdict has 1 to "
                "k + 1 tokens of each request"
            )
    largest = max(map(max, runs), default=-1)
    if largest >= vocab_size:
        raise PluginContractError(f"the {label} gave the token {largest}, outside the vocabulary of {vocab_size}")


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
