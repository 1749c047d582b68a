"""The whole target forward without transformers' code around the layers (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.target import bridge
from specdec.target.compare import close
from specdec.target.fused_layer import FusedDecoderLayer, FusedLayers
from specdec.target.linear import PackedLinear
from specdec.target.norm import FastNorm
from specdec.target.parts import decoder_stack

if TYPE_CHECKING:
    from torch import Tensor, nn

_FIRST_ROWS = 2048


class RotaryTable:
    """Rotary angles by position, looked up instead of computed."""

    def __init__(self, rotary: nn.Module, dtype: torch.dtype) -> None:
        """Fill the table with the first positions.

        Args:
            rotary: transformers' module: (tensor of the model's dtype, int64 [1, T]) -> cos and sin [1, T, width].
            dtype: of the model.
        """
        self._rotary = rotary
        self._like = torch.zeros(1, dtype=dtype)
        self._cos, self._sin = self._compute(torch.arange(_FIRST_ROWS))

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self._like, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def depends_on_position_alone(self, far: int) -> bool:
        """Whether a position's angles are the same whatever other positions are in the batch."""
        alone = self._compute(torch.tensor([0, 1, 17]))
        together = self._compute(torch.tensor([0, 1, 17, far]))
        return all(torch.equal(a, b[:3]) for a, b in zip(alone, together, strict=True))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos and sin, [T, width] each."""
        largest = int(positions.max())
        rows = self._cos.shape[0]
        if largest >= rows:
            while rows <= largest:
                rows *= 2
            self._cos, self._sin = self._compute(torch.arange(rows))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class FusedStack:
    """Embedding, fused decoder layers, final norm and logits of a model, with nothing in between."""

    def __init__(self, decoder: Any, layers: nn.ModuleList, lm_head: PackedLinear, rotary: RotaryTable) -> None:
        """Hold a model's parts; use `build`."""
        self._embed, self._norm, self._lm_head = decoder.embed_tokens, decoder.norm, lm_head
        self._layers = FusedLayers([layer.weights for layer in layers])  # type: ignore[misc]
        self._rotary = rotary

    @staticmethod
    def build(model: Any) -> FusedStack | None:
        """The stack of a fused model; None unless all its layers are fused and the stack gives the model's own logits.

        Args:
            model: after `specdec.target.fusion.fuse`, inside ``bridge.using(...)`` of a context without a cache.
        """
        config = model.config.get_text_config()
        decoder: Any
        decoder, layers = decoder_stack(model, config.num_hidden_layers)
        head = model.get_output_embeddings()
        parts = [getattr(decoder, name, None) for name in ("embed_tokens", "norm", "rotary_emb")]
        if None in parts or not all(isinstance(layer, FusedDecoderLayer) for layer in layers):
            return None
        if not isinstance(head, PackedLinear) or not isinstance(decoder.norm, FastNorm):
            return None
        if len({layer.weights.shape for layer in layers}) != 1:
            return None
        ids = (torch.arange(6) * 7 + 3) % config.vocab_size
        positions = torch.arange(6)
        with torch.inference_mode():
            rotary = RotaryTable(decoder.rotary_emb, layers[0].weights.qkv.dtype)  # type: ignore[union-attr, arg-type]
            if not rotary.depends_on_position_alone(1 << 20):
                return None
            stack = FusedStack(decoder, layers, head, rotary)
            expected = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
            logits, _, _ = stack(ids, positions, positions)
        return stack if close(logits, expected) else None

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        *,
        hidden: bool = False,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Run packed tokens; attention goes through `specdec.target.bridge`.

        Args:
            input_ids: int64 [T].
            positions: int64 [T].
            logits_indices: int64 [R], the tokens whose logits are wanted.
            hidden: also return the final hidden states.
            taps: indices of decoder layers whose outputs are wanted.

        Returns:
            Logits [R, V]; hidden states after the last norm [T, H] or None; one [T, H] per tap.
        """
        stream = self._embed(input_ids)
        cos, sin = self._rotary(positions)
        kept: dict[int, Tensor] = {}

        def tap(index: int) -> None:
            if index in taps:
                kept[index] = stream.clone()

        context = bridge.current()
        if context is None:
            raise RuntimeError("the stack was called outside specdec.target.bridge.using")
        self._layers.run(stream, cos, sin, context.attend, tap if taps else None)
        final = self._norm(stream) if hidden else None
        logits = self._lm_head.normalized(self._norm.norm_weight, stream.index_select(0, logits_indices))
        return logits, final, tuple(kept[index] for index in taps)
