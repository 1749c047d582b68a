"""The built-in verifier `match` as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.verify.base import Verifier


@hookimpl
def verify() -> Verifier:
    """Build the match verifier; it has no options."""
    from specdec.verify.match import MatchVerifier

    return MatchVerifier()
