"""Options of the verifier `typical`."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from specdec.config.validators import number


@frozen(kw_only=True)
class TypicalConfig:
    """How unlikely a draft token may be and still be kept; the defaults are Medusa's."""

    SECTION: ClassVar[str] = "verifier_options"
    NOTICE: ClassVar[str] = "lossy: the output does not have the target's distribution"

    epsilon: float = field(default=0.09, validator=number(0.0, 1.0))
    """A draft token that the target gives more than this probability is kept (Medusa's posterior_threshold)."""
    delta: float = field(default=0.3, validator=number(0.0))
    """Where the target is undecided less is enough: delta times exp(-entropy) (Medusa's posterior_alpha)."""
