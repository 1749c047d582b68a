"""How many tokens to draft: fixed, by batch size, or from what drafting and verifying cost and bring.

A control decides before anything is drafted, from past steps alone, so any verifier stays lossless (the length of a
draft must not depend on the draft's tokens).
"""

from specdec.control.adaptive import AdaptiveControl
from specdec.control.base import Control, FixedControl
from specdec.control.schedule import Schedule

__all__ = ["AdaptiveControl", "Control", "FixedControl", "Schedule"]
