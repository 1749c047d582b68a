"""What training needs of the target: its embedding, output rows, final norm and last layer, all frozen."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional


@frozen(eq=False)
class FrozenTarget:
    """Weights of the target in float32."""

    embedding: Tensor
    """[V, H]."""
    output_rows: Tensor
    """[draft vocabulary, H]: rows of the target's output projection."""
    final_norm: Tensor
    """[H]."""
    last_layer: dict[str, Tensor]
    """Weights of the last decoder layer, by their names within the layer."""
    draft_token_ids: Tensor
    """int64 [draft vocabulary]: the target ids that can be drafted, ascending."""

    def to(self, device: torch.device) -> FrozenTarget:
        """The same on another device; the last layer's weights, which only a start needs, are left out."""
        return FrozenTarget(
            embedding=self.embedding.to(device),
            output_rows=self.output_rows.to(device),
            final_norm=self.final_norm.to(device),
            last_layer={},
            draft_token_ids=self.draft_token_ids.to(device),
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., H]."""
        return functional.embedding(token_ids, self.embedding)

    def in_draft_vocabulary(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> bool [...]."""
        place = torch.searchsorted(self.draft_token_ids, token_ids).clamp(max=len(self.draft_token_ids) - 1)
        return self.draft_token_ids[place] == token_ids

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., draft vocabulary]."""
        return functional.linear(hidden, self.output_rows.to(hidden.dtype))


def frozen_target(model: Any, draft_token_ids: Tensor) -> FrozenTarget:
    """Take the weights out of a transformers causal language model.

    Args:
        model: the model, of which only weights are read.
        draft_token_ids: int64 [draft vocabulary]: the target ids the head can draft.
    """
    layers = model.model.layers
    return FrozenTarget(
        embedding=model.get_input_embeddings().weight.detach().float(),
        output_rows=model.get_output_embeddings().weight.detach().float()[draft_token_ids].contiguous(),
        final_norm=model.model.norm.weight.detach().float(),
        last_layer={name: weight.detach().float() for name, weight in layers[len(layers) - 1].state_dict().items()},
        draft_token_ids=draft_token_ids,
    )


def soft_targets(logits: Tensor) -> Tensor:
    """The target's law over the draft vocabulary, renormalised: [..., draft vocabulary]."""
    return torch.softmax(logits.float(), dim=-1)
