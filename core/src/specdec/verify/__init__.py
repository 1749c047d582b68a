"""Verifiers: the interface and the built-in ones."""

from specdec.verify.base import Verifier

__all__ = ["Verifier"]
