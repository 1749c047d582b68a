"""Options of the built-in verifiers: what ``verifier_options`` may hold."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen

from specdec.config.validators import choice


@frozen(kw_only=True)
class RejectionConfig:
    """Options of the verifier `rejection`."""

    SECTION: ClassVar[str] = "verifier_options"

    tree_rule: Literal["one_hot", "recursive"] = field(default="one_hot", validator=choice("one_hot", "recursive"))
    """How draft trees are verified. "one_hot": as if their tokens had been chosen without chance, exact for every tree.
    "recursive": each node against its row of ``draft_probs``, the law it was drawn from given its earlier siblings
    (multi-step speculative sampling of SpecInfer); exact if those laws are true, and accepts more at high
    temperature."""
