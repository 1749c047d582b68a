"""Options of the verifier `synthetic`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import optional

from specdec.config.validators import choice, number
from specdec.errors import ConfigError


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class SyntheticConfig:
    """What shall be kept: either the rate of each draft position, or how many tokens a step shall give on average."""

    SECTION: ClassVar[str] = "verifier_options"
    NOTICE: ClassVar[str] = "lossy, for benchmarks only: draft tokens are kept by chance, whatever they are"

    acceptance_rates: tuple[float, ...] | None = field(default=None, converter=_as_tuple)
    """Share of drafts of which position 1, 2, … is kept; must not rise. Positions without a rate are never kept."""
    acceptance_length: float | None = field(default=None, validator=optional(number(1.0)))
    """Tokens per step on average, the one after the kept draft tokens included; 1 to k + 1."""
    schedule: Literal["geometric", "steady"] = field(default="geometric", validator=choice("geometric", "steady"))
    """How acceptance_length spreads over positions: "geometric" as in real drafts, each position kept with the same
    chance; "steady" with the least variation, so that short runs measure precisely."""

    @acceptance_rates.validator
    def _check_rates(self, attribute: Any, value: Any) -> None:
        if value is None:
            return
        falls = isinstance(value, tuple) and all(_is_rate(rate) for rate in value)
        if not falls or not value or any(b > a for a, b in pairwise(value)):
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(
                f"verifier_options.acceptance_rates is {shown!r}; it must be a list of numbers between 0 and 1 that do "
                "not rise",
                path="verifier_options.acceptance_rates",
            )

    def __attrs_post_init__(self) -> None:
        if (self.acceptance_rates is None) == (self.acceptance_length is None):
            given = "neither is" if self.acceptance_rates is None else "both are"
            raise ConfigError(
                f"the verifier 'synthetic' needs either verifier_options.acceptance_rates or "
                f"verifier_options.acceptance_length; {given} given",
                path="verifier_options.acceptance_length",
            )

    def rates(self, num_draft_tokens: int) -> tuple[float, ...]:
        """Unconditional rates of the positions 1 … ``num_draft_tokens``.

        Raises:
            ConfigError: there are more rates than positions, or acceptance_length is more than a step can give.
        """
        k = num_draft_tokens
        if self.acceptance_rates is not None:
            if len(self.acceptance_rates) > k:
                raise ConfigError(
                    f"verifier_options.acceptance_rates has {len(self.acceptance_rates)} entries, but "
                    f"speculative.num_speculative_tokens is {k}",
                    path="verifier_options.acceptance_rates",
                )
            return (*self.acceptance_rates, *[0.0] * (k - len(self.acceptance_rates)))
        assert self.acceptance_length is not None
        if self.acceptance_length > k + 1:
            raise ConfigError(
                f"verifier_options.acceptance_length is {self.acceptance_length:g}, but with "
                f"speculative.num_speculative_tokens {k} a step gives at most {k + 1} tokens",
                path="verifier_options.acceptance_length",
            )
        wanted = self.acceptance_length - 1
        return steady_rates(wanted, k) if self.schedule == "steady" else geometric_rates(wanted, k)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def geometric_rates(wanted: float, k: int) -> tuple[float, ...]:
    """Rates a, a², …, a^k that sum to ``wanted``, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _geometric_sum(middle, k) < wanted:
            low = middle
        else:
            high = middle
    return tuple(high**place for place in range(1, k + 1))


def _geometric_sum(ratio: float, k: int) -> float:
    return sum(ratio**place for place in range(1, k + 1))


def steady_rates(wanted: float, k: int) -> tuple[float, ...]:
    """As many rates of 1 as fit into ``wanted``, then what is left of it, then 0."""
    return tuple(min(1.0, max(0.0, wanted - place)) for place in range(k))


def conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """The chance of each position once all before it are kept; 0 where none is."""
    before = (1.0, *rates)
    return tuple(rate / last if last > 0 else 0.0 for last, rate in zip(before, rates, strict=False))
