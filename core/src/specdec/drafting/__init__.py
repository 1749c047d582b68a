"""Public kit for proposers: the base classes a method implements."""

from specdec.drafting.base import DraftHead, Proposer

__all__ = ["DraftHead", "Proposer"]
