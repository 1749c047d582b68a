"""Options of the method `mlp_speculator`."""

from __future__ import annotations

from attrs import field, frozen

from specdec.config import validators as check
from specdec.drafting.token_trees import TreeOptions


@frozen(kw_only=True)
class MlpSpeculatorConfig(TreeOptions):
    """Which network drafts, and in what shape."""

    model: str = field(validator=check.text())
    """The speculator: a directory or a model id."""
