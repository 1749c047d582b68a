"""Options of the method `composite`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import field, frozen

from specdec.config import validators as check
from specdec.config.problems import InvalidValueError

if TYPE_CHECKING:
    from specdec.registry import Registry

MEMBERS = "speculative.proposers"
_FORM = 'a list of tables such as {"method": "ngram", "prompt_lookup_max": 4}, one for each member'


@frozen(kw_only=True)
class CompositeConfig:
    """Which methods draft, and which of their drafts is taken."""

    SECTION: ClassVar[str] = "speculative"

    proposers: Any = field()
    """The members in order, each a table with `method` and that method's options; num_speculative_tokens where a
    member shall draft fewer."""
    choose: Literal["first", "best"] = field(default="first", validator=check.choice("first", "best"))
    """first takes the first member's draft that is not empty. best takes the draft with the most tokens expected to be
    accepted, and asks a member only while what it is expected to add is worth the time of its drafts."""
    max_member_faults: int = field(default=3, validator=check.integer(1))
    """A member is switched off after this many faults in a row."""

    @proposers.validator
    def _check_members(self, attribute: Any, value: Any) -> None:
        if not isinstance(value, list | tuple) or not value:
            raise InvalidValueError(MEMBERS, value, _FORM)
        for index, member in enumerate(value):
            path = f"{MEMBERS}[{index}]"
            if not isinstance(member, dict):
                raise InvalidValueError(path, member, "a table with 'method'")
            method = member.get("method")
            if not isinstance(method, str) or not method:
                raise InvalidValueError(f"{path}.method", method, "the name of an installed proposer")
            if "num_speculative_tokens" in member and not check.integer(1).passes(member["num_speculative_tokens"]):
                raise InvalidValueError(
                    f"{path}.num_speculative_tokens", member["num_speculative_tokens"], "an integer of at least 1"
                )

    def check_plugins(self, registry: Registry) -> None:
        """Check the members' own options, before any model is loaded.

        Raises:
            ConfigError: an option is wrong; the path names the member.
            PluginError: a method is not installed or cannot be used.
        """
        from specdec_composite.options import read_members

        read_members(self.proposers, registry)
