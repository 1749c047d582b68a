"""Where a transformers model's attention meets the engine's attention backend.

The function `attention_forward` is registered with transformers' attention interface under `ATTENTION_NAME`. No mask
function is registered under that name, so models build no masks and the backend alone decides who sees whom. What the
layers of a step share (backend, plan) is kept in a context of the running thread, because keyword arguments given to a
model do not reach every architecture's attention.

Three contexts exist: `StepContext` (a forward pass of the engine), `ReferenceContext` (dense causal attention
without a cache, for checks at load) and `specdec.target.trace.TraceContext` (records what each layer asks for).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import frozen

from specdec.attention.dense import dense_attention, visible
from specdec.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from specdec.attention.interface import AttentionBackend
    from specdec.types import AttentionLayer

ATTENTION_NAME = "specdec"
"""Name in transformers' attention interface; it has no mask function, so models pass ``attention_mask=None``."""

TRACE_NAME = "specdec_trace"
"""The same function under a name with a mask function that notes which pattern each layer asks for."""


class AttentionContext(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend for a layer known by its index: [T, heads, dim] each -> [T, num_heads, v_head_dim]."""

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
        """Attend for a call that came through transformers' attention interface."""


@frozen
class QueryScale:
    """Scaling of queries by position: ``log1p(floor((position + offset) / floor_scale)) * attn_scale + 1``."""

    floor_scale: float
    attn_scale: float
    offset: int = 1

    def factors(self, positions: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, 1, 1]."""
        steps = torch.floor((positions.float() + self.offset) / self.floor_scale)
        return (torch.log1p(steps) * self.attn_scale + 1.0)[:, None, None]


class _Running(threading.local):
    context: AttentionContext | None = None


_running = _Running()


def current() -> AttentionContext | None:
    """The context that answers attention calls of this thread now."""
    return _running.context


def _context() -> AttentionContext:
    context = _running.context
    if context is None:
        raise RuntimeError("attention was called outside a forward pass of specdec.target.TargetModel")
    return context


@contextmanager
def using(context: AttentionContext) -> Iterator[None]:
    """Let ``context`` answer the attention calls of this thread inside the ``with`` block."""
    previous = _running.context
    _running.context = context
    try:
        yield
    finally:
        _running.context = previous


def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attend for a decoder layer that calls the backend directly (fused layers).

    Args:
        layer_index: index into the target's ``AttentionRequirements.layers``.
        query: [T, num_heads, head_dim]; may be a strided view.
        key: [T, num_kv_heads, head_dim]; may be a strided view.
        value: [T, num_kv_heads, v_head_dim]; may be a strided view.
        sinks: [num_heads] logits of layers with attention sinks.

    Returns:
        [T, num_heads, v_head_dim], contiguous, in the dtype of ``query``.
    """
    return _context().attend(layer_index, query, key, value, sinks)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers models call; packed tokens, so the batch dimension is 1.

    Args:
        module: the attention module; it tells which layer is calling.
        query: [1, num_heads, T, head_dim].
        key: [1, num_kv_heads, T, head_dim].
        value: [1, num_kv_heads, T, v_head_dim].
        attention_mask: None except while tracing.
        scaling: factor on the scores.
        options: whatever else the architecture passes (``sliding_window``, ``softcap``, ``s_aux``, …).

    Returns:
        [1, T, num_heads, v_head_dim] and None in place of attention weights.
    """
    context = _context()
    out = context.attend_module(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_mask,
        scaling,
        options,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Make `attention_forward` known to transformers under `ATTENTION_NAME` and `TRACE_NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from specdec.target.trace import mask_for_trace

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionInterface.register(TRACE_NAME, attention_forward)
    AttentionMaskInterface.register(TRACE_NAME, mask_for_trace)


class _LayerContext:
    """What both kinds of contexts share: from a module to its layer."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        index_of: Mapping[nn.Module, int],
        query_scales: Mapping[int, QueryScale],
    ) -> None:
        self._layers = layers
        self._index_of = index_of
        self._query_scales = query_scales

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        raise NotImplementedError

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
        """See `AttentionContext.attend_module`."""
        return self.attend(self._index_of[module], query, key, value, options.get("s_aux"))

    def _scaled(self, layer_index: int, query: Tensor, positions: Tensor) -> Tensor:
        scale = self._query_scales.get(layer_index)
        return query if scale is None else (query * scale.factors(positions)).to(query.dtype)


class StepContext(_LayerContext):
    """Hands every attention call of one forward pass to the backend."""

    def __init__(
        self,
        backend: AttentionBackend,
        plan: Any,
        layers: Sequence[AttentionLayer],
        index_of: Mapping[nn.Module, int],
        query_scales: Mapping[int, QueryScale],
        positions: Tensor,
    ) -> None:
        """Serve one step.

        Args:
            backend: the engine's attention backend.
            plan: what ``backend.plan`` returned for this step.
            layers: facts about the attention layers.
            index_of: which module is which layer.
            query_scales: layers whose queries are scaled by position.
            positions: int64 [T].
        """
        super().__init__(layers, index_of, query_scales)
        self._backend_attend = backend.attend
        self._name = backend.name
        self._checked = False
        self._plan = plan
        self._positions = positions

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """See `AttentionContext.attend`."""
        if self._query_scales:
            query = self._scaled(layer_index, query, self._positions)
        layer = self._layers[layer_index]
        out = self._backend_attend(query, key, value, layer, self._plan, sinks)
        if not self._checked:
            self._checked = True  # once a step: what a backend does wrong it does in every layer
            self._check(out, query, layer)
        return out

    def _check(self, out: Tensor, query: Tensor, layer: AttentionLayer) -> None:
        """Refuse an output of another form: broadcast or cast by what follows, it would make other text."""
        wanted = (len(query), layer.num_heads, layer.v_head_dim)
        if not isinstance(out, torch.Tensor) or out.dtype is not query.dtype or out.shape != wanted:
            got = f"{out.dtype} {list(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise PluginContractError(
                f"attend() of the attention backend {self._name!r} returned {got}, where {query.dtype} {list(wanted)} "
                "is required",
                kind="attention_backend",
                name=self._name,
            )


class ReferenceContext(_LayerContext):
    """Dense causal attention over the tokens of one forward pass, without a cache.

    Used at load: fusion passes compare fused with original modules under it, and the packed forward is compared with
    the model's own.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        index_of: Mapping[nn.Module, int],
        query_scales: Mapping[int, QueryScale],
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> None:
        """Tokens see earlier tokens of their own segment.

        Args:
            layers: facts about the attention layers.
            index_of: which module is which layer.
            query_scales: layers whose queries are scaled by position.
            positions: int64 [T]; None: one sequence that starts at 0, of any length.
            segments: int64 [T]: which sequence each token belongs to; None: all to one.
        """
        super().__init__(layers, index_of, query_scales)
        self._positions = positions
        self._segments = segments
        self.called: list[int] = []
        """Layer indices in the order of calls."""

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """See `AttentionContext.attend`."""
        layer = self._layers[layer_index]
        self.called.append(layer_index)
        positions = self._positions
        if positions is None:
            positions = torch.arange(query.shape[0], device=query.device)
        allowed = visible(positions, positions, layer.sliding_window, layer.chunk_size)
        if self._segments is not None:
            allowed &= self._segments[:, None] == self._segments[None, :]
        query = self._scaled(layer_index, query, positions)
        return dense_attention(query, key, value, allowed, layer.scaling, layer.softcap, sinks)
