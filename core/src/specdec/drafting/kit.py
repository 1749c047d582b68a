"""What model-based proposers share: draft layers over the target's block tables, and chains drafted with them."""

from specdec.drafting.chain import ChainDrafter, Chains, NextLogits, no_draft
from specdec.drafting.layers_kv import DraftLayers, draft_backend
from specdec.drafting.packing import SlotTable, Span
from specdec.drafting.parallel import MASK_TOKEN_KEYS, logits_in_parallel
from specdec.drafting.sampling import DraftSampler, sampling_tensors
from specdec.drafting.validity import DraftState, DraftValidity

__all__ = [
    "MASK_TOKEN_KEYS",
    "ChainDrafter",
    "Chains",
    "DraftLayers",
    "DraftSampler",
    "DraftState",
    "DraftValidity",
    "NextLogits",
    "SlotTable",
    "Span",
    "draft_backend",
    "logits_in_parallel",
    "no_draft",
    "sampling_tensors",
]
