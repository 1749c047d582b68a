"""Options of the methods `eagle` and `eagle3`, with vLLM's names where it has them."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.drafting.token_trees import TreeOptions


@frozen(kw_only=True)
class EagleConfig(TreeOptions):
    """Which head drafts, and in what shape."""

    model: str = field(validator=check.text())
    """The head: a directory or a model id."""
    parallel_drafting: bool | None = field(default=None, validator=optional(check.boolean()))
    """Draft all tokens of a chain in one pass, which only heads trained for it can (P-EAGLE); by default the checkpoint
    decides."""
    head_config: dict[str, Any] = field(factory=dict, converter=check.as_dict, validator=check.table())
    """Keys of the head's configuration that shall be otherwise, for heads whose config.json says too little or wrong
    things, for example ``eagle_aux_hidden_state_layer_ids``."""
