"""What a request may say about its own speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from specdec.config.problems import closest
from specdec.errors import InvalidRequestError
from specdec.wording import shown

OFF = "off"
_FORMS = "a RequestSpeculation, a dict of its fields, True, False or 'off'"


@frozen(kw_only=True)
class RequestSpeculation:
    """The speculation of one request. It changes speed, never the output of a lossless verifier.

    Raises:
        InvalidRequestError: a field has a value that can never be right.
    """

    method: str | None = None
    """Which of the engine's loaded methods drafts for the request; the engine decides when None."""
    num_speculative_tokens: int | None = None
    """Most draft tokens per step, at most the engine's; 0 drafts nothing."""
    enabled: bool = True
    """False decodes the request plainly."""

    def __attrs_post_init__(self) -> None:
        if self.method is not None and (not isinstance(self.method, str) or not self.method):
            raise InvalidRequestError(f"speculation.method = {self.method!r}: must be the name of a loaded method")
        k = self.num_speculative_tokens
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise InvalidRequestError(f"speculation.num_speculative_tokens = {k!r}: must be an integer of at least 0")
        if not isinstance(self.enabled, bool):
            raise InvalidRequestError(f"speculation.enabled = {self.enabled!r}: must be true or false")

    def limit(self, num_speculative_tokens: int) -> int:
        """The most draft tokens per step, where the engine drafts up to ``num_speculative_tokens``."""
        if not self.enabled:
            return 0
        own = self.num_speculative_tokens
        return num_speculative_tokens if own is None else min(own, num_speculative_tokens)

    def check_against(self, methods: Sequence[str], num_speculative_tokens: int) -> None:
        """Refuse what the engine cannot do.

        Args:
            methods: names a request may choose; empty without speculation.
            num_speculative_tokens: the engine's limit; 0 without speculation.

        Raises:
            InvalidRequestError: the method is not loaded, or more tokens are wanted than the engine drafts.
        """
        if self.method is not None and self.method not in methods:
            raise InvalidRequestError(_not_loaded(self.method, methods))
        k = self.num_speculative_tokens
        if k is not None and k > num_speculative_tokens:
            engine = f"with at most {num_speculative_tokens} draft tokens" if methods else "without speculation"
            raise InvalidRequestError(
                f"speculation.num_speculative_tokens = {k}, but the engine decodes {engine}: a request can lower "
                "speculative.num_speculative_tokens, not raise it"
            )


def as_request_speculation(value: Any) -> RequestSpeculation | None:
    """What a user passed as ``speculation``, as a value; None leaves everything to the engine.

    Raises:
        InvalidRequestError: the value has none of the accepted forms, or a field is unknown or wrong.
    """
    if value is None or isinstance(value, RequestSpeculation):
        return value
    if value is True:
        return RequestSpeculation()
    if value is False or value == OFF:
        return RequestSpeculation(enabled=False)
    if isinstance(value, Mapping):
        known = [field.name for field in attrs.fields(RequestSpeculation)]
        for key in value:
            if key not in known:
                near = closest(str(key), known)
                hint = f"Did you mean {near!r}?" if near else f"Known here: {', '.join(known)}."
                raise InvalidRequestError(f"unknown setting 'speculation.{key}'. {hint}")
        return RequestSpeculation(**value)
    raise InvalidRequestError(f"speculation = {shown(value)}: must be {_FORMS}")


def _not_loaded(method: str, methods: Sequence[str]) -> str:
    if not methods:
        return (
            f"speculation.method = {method!r}, but the engine runs without speculation: "
            "set speculative.method when it starts"
        )
    near = closest(method, methods)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"speculation.method = {method!r} is not loaded in this engine.{hint} Loaded: {', '.join(methods)}."
