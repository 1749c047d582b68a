"""Tables of statistics for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from specdec.metrics import EngineStats
    from specdec.types import SpecStats


def stats_table(stats: EngineStats, seconds: float | None = None) -> Table:
    """Two columns of what an engine did.

    Args:
        stats: the engine's totals.
        seconds: wall time, for tokens per second; the time spent in steps when None.
    """
    table = Table.grid(padding=(0, 2))
    for label, value in stats_rows(stats, stats.step_seconds if seconds is None else seconds):
        table.add_row(label, value)
    return table


def stats_rows(stats: EngineStats, seconds: float) -> list[tuple[str, str]]:
    """Label and value of each line of `stats_table`."""
    rate = stats.num_generated_tokens / seconds if seconds > 0 else 0.0
    rows = [
        ("generated", f"{stats.num_generated_tokens} tokens, {rate:.1f} tokens/s"),
        ("steps", f"{stats.num_steps}; ms per step: {time_shares(stats)}"),
    ]
    if stats.num_cached_tokens:
        rows.append(("prefix cache", f"{stats.num_cached_tokens} prompt tokens reused"))
    if stats.num_drafts:
        rows += [
            ("acceptance length", f"{stats.mean_acceptance_length:.2f} tokens per verify step with a draft"),
            ("accepted", f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens"),
            ("accepted at position", f"{accepted_at(stats.spec)} of all drafts"),
        ]
    for name, counts in stats.proposer.get("members", {}).items():
        tokens = f"{counts['num_accepted_tokens']} of {counts['num_draft_tokens']} draft tokens accepted"
        rows.append((f"  of {name}", f"{counts['num_drafts']} drafts, {tokens}"))
    if stats.grammar_seconds:
        rows.append(("grammars", _grammars(stats)))
    if stats.num_preemptions:
        rows.append(("preemptions", str(stats.num_preemptions)))
    if stats.num_proposer_faults:
        rows.append(("proposer faults", str(stats.num_proposer_faults)))
    if stats.speculation_disabled:
        rows.append(("speculation", "switched off after too many faults in a row"))
    elif stats.speculation_paused:
        rows.append(("speculation", "paused, because it does not pay"))
    return rows


def _grammars(stats: EngineStats) -> str:
    share = stats.grammar_seconds / stats.step_seconds if stats.step_seconds else 0.0
    return (
        f"{1000 * stats.grammar_seconds / max(stats.num_steps, 1):.2f} ms per step ({share:.1%}), "
        f"{stats.num_grammar_cut_tokens} draft tokens cut, "
        f"{stats.num_grammar_accepted_tokens} of {stats.num_grammar_forced_tokens} added ones kept"
    )


def time_shares(stats: EngineStats) -> str:
    """Milliseconds per step in each stage."""
    steps = max(stats.num_steps, 1)
    stages = (
        ("target", stats.target_seconds),
        ("verify", stats.verify_seconds),
        ("propose", stats.propose_seconds),
        ("rest", stats.rest_seconds),
    )
    return ", ".join(f"{name} {1000 * seconds / steps:.2f}" for name, seconds in stages)


def accepted_at(spec: SpecStats) -> str:
    """The share of all drafts that was accepted at each draft position; see `per_position`."""
    drafted = tuple([number / max(spec.num_drafts, 1) for number in spec.num_draft_tokens_per_pos])
    return per_position(spec.acceptance_rate_per_pos, drafted)


def per_position(accepted: tuple[float, ...], drafted: tuple[float, ...]) -> str:
    """'75 63 20 %'; where some drafts were shorter, '75 63 20 % (100 90 40 % drafted)'.

    Args:
        accepted: of all drafts, the share that was accepted at each draft position.
        drafted: draft tokens at each position by drafts: of chains the share that had a token there. Trees have more
            than one, and nothing is said of them.
    """
    says_nothing = all(rate == 1.0 for rate in drafted) or any(rate > 1.0 for rate in drafted)
    return percentages(accepted) + ("" if says_nothing else f" ({percentages(drafted)} drafted)")


def percentages(rates: tuple[float, ...]) -> str:
    """Rates as '75 63 55 %'; a dash when there are none."""
    return " ".join(f"{100 * rate:.0f}" for rate in rates) + " %" if rates else "-"
