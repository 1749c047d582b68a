"""The two dataflows of heads that run on their own output: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025).

A head package reads the weights of its checkpoint layout and puts one of these together from parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from attrs import field, frozen

from specdec.drafting.base import DraftHead
from specdec.drafting.modules import NormedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from specdec.drafting.base import MaskRow
    from specdec.target.bridge import QueryScale
    from specdec.types import AttentionLayer


class DraftLayer(Protocol):
    """A decoder layer behind its input norm, for example `specdec.drafting.layers.LlamaLayer`."""

    attention: AttentionLayer

    def __call__(self, inputs: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, input width], [T, h], rotary angles [T, width] twice -> [T, h]."""


@frozen(eq=False)
class Block:
    """A decoder layer with its input norm, if it has one."""

    layer: DraftLayer
    input_norm: nn.Module | None = None

    def __call__(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, h] -> [T, h]."""
        inputs = hidden_states if self.input_norm is None else self.input_norm(hidden_states)
        return self.layer(inputs, hidden_states, cos, sin)


@frozen(eq=False, kw_only=True)
class Vocabulary:
    """What a head reads and writes tokens with."""

    embed: Callable[[Tensor], Tensor]
    """int64 [T] target ids -> [T, h]."""
    output: nn.Module
    """[R, h] -> [R, size]."""
    size: int
    """Width of the output."""
    target_ids: Tensor | None = None
    """See `DraftHead.target_ids`."""
    scale: float = 1.0
    """Factor on the logits."""


@frozen(eq=False, kw_only=True)
class FeaturePrediction:
    """What an EAGLE head does around its layers.

    Row i::

        z = join([embed_norm(embed_scale * E(x_{i+1})); hidden_norm(f_i)])      f: final hidden states of the target
        o = output_scale * output_norm(layers(z))                               o imitates f_{i+1}
        logits = output(logits_norm(o))                                         the next row takes o
    """

    join: nn.Module
    """[T, 2h] -> [T, h]."""
    blocks: Sequence[Block]
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    embed_norm: nn.Module | None = None
    hidden_norm: nn.Module | None = None
    output_norm: nn.Module | None = None
    logits_norm: nn.Module | None = None
    embed_scale: float = 1.0
    output_scale: float = 1.0


class FeaturePredictingHead(DraftHead):
    """An EAGLE (EAGLE-1, EAGLE-2) head: reads the target's final hidden states and predicts the next one."""

    def __init__(
        self,
        parts: FeaturePrediction,
        vocabulary: Vocabulary,
        query_scales: Mapping[int, QueryScale] | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        """Put a head together; see `FeaturePrediction`."""
        self._parts = parts
        self._vocabulary = vocabulary
        self._memory = dict(memory or {})
        self.attention_layers = tuple(block.layer.attention for block in parts.blocks)
        self.query_scales = query_scales or {}
        self.draft_vocab_size = vocabulary.size
        self.target_ids = vocabulary.target_ids

    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """The final hidden states as they are."""
        return hidden_states[0]

    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """See `DraftHead.forward`."""
        parts = self._parts
        embedded = self._vocabulary.embed(token_ids)
        if parts.embed_scale != 1.0:
            embedded = embedded * parts.embed_scale
        if parts.embed_norm is not None:
            embedded = parts.embed_norm(embedded)
        if parts.hidden_norm is not None:
            hidden_states = parts.hidden_norm(hidden_states)
        stream: Tensor = parts.join(torch.cat([embedded, hidden_states], dim=-1))
        cos, sin = parts.rotary(positions)
        for block in parts.blocks:
            stream = block(stream, cos, sin)
        if parts.output_norm is not None:
            stream = parts.output_norm(stream)
        return stream if parts.output_scale == 1.0 else stream * parts.output_scale

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        norm, vocabulary = self._parts.logits_norm, self._vocabulary
        logits: Tensor = (
            vocabulary.output(hidden_states) if norm is None else NormedLinear(norm, vocabulary.output)(hidden_states)
        )
        return logits if vocabulary.scale == 1.0 else logits * vocabulary.scale

    def memory(self) -> Mapping[str, int]:
        """See `DraftHead.memory`."""
        return self._memory


@frozen(eq=False, kw_only=True)
class FeatureFusion:
    """What an EAGLE-3 head does around its layers.

    Row i::

        g = join([S_1; S_2; …]_i)                            only where the target has been; S: tapped hidden states
        u = hidden_norm(g),  r = u if normed_residual else g
        o = layers(first([embed_norm(E(x_{i+1})); u], residual r))
        logits = output(norm(o))                             the next row takes o, or norm(o) if normed_feedback
    """

    taps: tuple[int, ...]
    """Decoder layers whose outputs are read; empty: the final hidden states."""
    join: nn.Module | None
    """[T, n H] -> [T, h]; None: one hidden state is taken as it is."""
    join_norms: Sequence[nn.Module] = field(factory=tuple)
    """Norms before ``join``: none, one for all hidden states together, or one for each."""
    embed_norm: nn.Module
    hidden_norm: nn.Module
    first: DraftLayer
    blocks: Sequence[Block] = field(factory=tuple)
    """Further layers."""
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    norm: nn.Module
    normed_residual: bool = False
    normed_feedback: bool = False
    mask_row: MaskRow | None = None
    """See `DraftHead.mask_row`."""


class FeatureFusingHead(DraftHead):
    """An EAGLE-3 head: reads hidden states of several layers of the target and runs on its own output."""

    def __init__(
        self,
        parts: FeatureFusion,
        vocabulary: Vocabulary,
        query_scales: Mapping[int, QueryScale] | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> None:
        """Put a head together; see `FeatureFusion`."""
        self._parts = parts
        self._vocabulary = vocabulary
        self._memory = dict(memory or {})
        self._normed_output = NormedLinear(parts.norm, vocabulary.output)
        self.taps = parts.taps
        self.mask_row = parts.mask_row
        self.attention_layers = (parts.first.attention, *(block.layer.attention for block in parts.blocks))
        self.query_scales = query_scales or {}
        self.draft_vocab_size = vocabulary.size
        self.target_ids = vocabulary.target_ids

    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """See `DraftHead.fuse`."""
        parts = self._parts
        if len(parts.join_norms) > 1:
            hidden_states = tuple(norm(state) for norm, state in zip(parts.join_norms, hidden_states, strict=True))
        joint = hidden_states[0] if len(hidden_states) == 1 else torch.cat(hidden_states, dim=-1)
        if len(parts.join_norms) == 1:
            joint = parts.join_norms[0](joint)
        return joint if parts.join is None else parts.join(joint)

    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        """See `DraftHead.forward`."""
        parts = self._parts
        normed = parts.hidden_norm(hidden_states)
        inputs = torch.cat([parts.embed_norm(self._vocabulary.embed(token_ids)), normed], dim=-1)
        cos, sin = parts.rotary(positions)
        stream = parts.first(inputs, normed if parts.normed_residual else hidden_states, cos, sin)
        for block in parts.blocks:
            stream = block(stream, cos, sin)
        return parts.norm(stream) if parts.normed_feedback else stream

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        vocabulary = self._vocabulary
        logits: Tensor = (
            vocabulary.output(hidden_states) if self._parts.normed_feedback else self._normed_output(hidden_states)
        )
        return logits if vocabulary.scale == 1.0 else logits * vocabulary.scale

    def memory(self) -> Mapping[str, int]:
        """See `DraftHead.memory`."""
        return self._memory
