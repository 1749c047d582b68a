"""Public kit for proposers: the base classes a method implements."""

from specdec.drafting.base import DraftHead, MaskRow, Proposer

__all__ = ["DraftHead", "MaskRow", "Proposer"]
