"""Finds a model's parts by structure: decoder stack, layers, logits; takes the text part of multimodal models."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor


class ModelParts:
    """A causal language model with what taps and forward passes need to know of it."""

    def __init__(self, model: Any) -> None:
        """Look at a model.

        Args:
            model: its forward takes ``input_ids`` and ``position_ids`` and returns an object with ``logits``.

        Raises:
            UnsupportedModelError: its decoder layers cannot be told apart.
        """
        self.model = model
        self.config = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        self.dtype: torch.dtype = model.dtype
        self.decoder, self.layers = decoder_stack(model, self.config.num_hidden_layers)
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def logits(self, input_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """int64 [T] ids and positions -> [R, V] logits of ``rows`` (int64 [R]), or of all tokens."""
        options = {} if rows is None or not self._keeps_rows else {"logits_to_keep": rows}
        output = self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **options)
        logits: Tensor = output.logits[0]
        return logits if rows is None or self._keeps_rows else logits.index_select(0, rows)


class TextModel(nn.Module):
    """The decoder stack and output embeddings of a multimodal model, as a causal language model."""

    model: Any
    lm_head: Any

    def __init__(self, whole: Any) -> None:
        """Take the text part of ``whole``; nothing else of it is kept."""
        super().__init__()
        self.config = whole.config.get_text_config()
        self.generation_config = getattr(whole, "generation_config", None)
        self.dtype = whole.dtype
        self.model, _ = decoder_stack(whole, self.config.num_hidden_layers)
        self.lm_head = whole.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        """The decoder stack."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The linear that gives the logits."""
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """Select an attention implementation, as transformers models do."""
        self.model.set_attn_implementation(name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
    ) -> SimpleNamespace:
        """int64 [1, T] ids and positions -> an object with ``logits`` [1, R, V]."""
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep]))


def text_part(model: Any) -> ModelParts:
    """The causal language model in ``model``; towers of other modalities are left behind, so that their memory can be
    freed.

    The text part is used alone only if it gives the logits of the whole model.

    Raises:
        UnsupportedModelError: no language model with a head is found in it.
    """
    whole = ModelParts(model)
    if not _has_towers(model):
        return whole
    alone = ModelParts(TextModel(model))
    ids = torch.arange(5, device=whole.device)
    with torch.inference_mode():
        same = torch.allclose(alone.logits(ids, ids), whole.logits(ids, ids), rtol=1e-2, atol=1e-2)
    return alone if same else whole


def _has_towers(model: Any) -> bool:
    """Whether parameters exist outside the decoder stack and the output embeddings."""
    head = model.get_output_embeddings()
    decoder, _ = decoder_stack(model, model.config.get_text_config().num_hidden_layers)
    if head is None or not hasattr(decoder, "set_attn_implementation"):
        return False
    known = {id(parameter) for part in (decoder, head) for parameter in part.parameters()}
    return any(id(parameter) not in known for parameter in model.parameters())


def decoder_stack(model: Any, count: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder layers and gives ``last_hidden_state``, and the list of its ``count`` layers.

    Raises:
        UnsupportedModelError: there is no such list.
    """
    named = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in (named or model).modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers")
