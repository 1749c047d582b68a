"""Runs attention-carrying modules with a stand-in for attention that shows what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.target import bridge
from specdec.target.compare import close

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


class ProbeContext:
    """Keeps every query, key and value, and answers with the query, which makes outputs depend on all of them."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        """Query, key and value of each call, in order."""

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """See `specdec.target.bridge.AttentionContext.attend`."""
        self.seen += [query.clone(), key.clone(), value.clone()]
        per_head = query.shape[1] // key.shape[1]
        return (query + value.repeat_interleave(per_head, dim=1)).contiguous()

    def attend_module(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """See `specdec.target.bridge.AttentionContext.attend_module`."""
        return self.attend(-1, query, key, value, None)


def observe(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
    """A module's output under `ProbeContext`, and the queries, keys and values it hands over."""
    context = ProbeContext()
    with bridge.using(context), torch.inference_mode():
        return module(*args, **kwargs), context.seen


def behaves_like(module: nn.Module, original: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether a module gives the output of another one, and the same queries, keys and values, up to rounding."""
    expected, expected_seen = observe(original, *args, **kwargs)
    result, seen = observe(module, *args, **kwargs)
    if len(seen) != len(expected_seen):
        return False
    return all(close(a, b) for a, b in zip([result, *seen], [expected, *expected_seen], strict=True))
