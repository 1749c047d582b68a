"""Options of the built-in verifiers: what ``verifier_options`` may hold."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

TREE_RULES = ("one_hot", "recursive")


@frozen(kw_only=True)
class RejectionConfig:
    """Options of the verifier `rejection`."""

    tree_rule: str = field(default="one_hot", validator=in_(TREE_RULES))
    """How draft trees are verified. "one_hot": as if their tokens had been chosen without chance, exact for every tree.
    "recursive": each node against its row of ``draft_probs``, the law it was drawn from given its earlier siblings
    (multi-step speculative sampling of SpecInfer); exact if those laws are true, and accepts more at high
    temperature."""
