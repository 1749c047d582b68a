"""``specdec top``: a running server in the terminal."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from specdec.cli.console import harmless, make_console
from specdec.errors import SpecdecError
from specdec.wording import reason_of
from specdec_server.metrics.reading import Snapshot

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIMEOUT = 10.0
_MOST_BYTES = 16 << 20
_BAR_WIDTH = 24


class UnreachableError(SpecdecError):
    """The server does not answer, or what answers is none of ours."""


def read(url: str) -> Snapshot:
    """The server's metrics now.

    Raises:
        UnreachableError: it gives none.
    """
    page = url.rstrip("/") + "/metrics"
    if not page.startswith(("http://", "https://")):
        raise UnreachableError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT) as answer:
            snapshot = Snapshot.parse(answer.read(_MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        said = reason_of(cause) if isinstance(cause, BaseException) else cause
        raise UnreachableError(f"no metrics at {page}: {said}. Is the server running?") from error
    if not snapshot.labels("num_requests_running"):
        raise UnreachableError(f"{page} has no metrics of specdec; is it the address of a specdec server?")
    return snapshot


def watch(url: str, interval: float, *, once: bool) -> int:
    """Show the server until Ctrl-C; a server that stops answering is waited for.

    Args:
        url: its address.
        interval: seconds between two looks.
        once: print one view and return.
    """
    before, began = read(url), time.monotonic()
    console = make_console()
    if once:
        time.sleep(interval)
        console.print(view(url, before, read(url), time.monotonic() - began))
        return 0
    from rich.live import Live

    first = view(url, before, before, 0.0)
    with (
        suppress(KeyboardInterrupt),
        Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval)
            try:
                now, at = read(url), time.monotonic()
            except UnreachableError as error:
                live.update(Group(_title(url), "", harmless(str(error))), refresh=True)
                continue
            live.update(view(url, before, now, at - began), refresh=True)
            before, began = now, at
    return 0


def view(url: str, before: Snapshot, now: Snapshot, seconds: float) -> RenderableType:
    """What is shown.

    Args:
        url: the server's address.
        before: the last look.
        now: this one.
        seconds: between the two; 0 shows what is since the server's start.
    """
    recent = now.since(before) if seconds else now
    table = Table.grid(padding=(0, 2))
    for label, text in rows(now, recent, seconds):
        table.add_row(f"[bold]{label}[/bold]", harmless(text))
    info = now.labels("speculation_info")
    model = info[0].get("model_name", "") if info else ""
    return Group(_title(url, model), "", table)


def _title(url: str, model: str = "") -> str:
    return f"[bold]specdec[/bold] {harmless(url)}  {harmless(model)}".rstrip()


def rows(now: Snapshot, recent: Snapshot, seconds: float) -> list[tuple[str, str]]:
    """Label and text of each line."""
    return [
        (
            "requests",
            f"{now.value('num_requests_running'):.0f} running, {now.value('num_requests_waiting'):.0f} waiting",
        ),
        ("ended", _ended(now)),
        ("tokens", _speeds(recent, seconds)),
        ("KV cache", _kv_cache(now)),
        ("prefix cache", _prefix_cache(recent)),
        ("preemptions", f"{now.value('num_preemptions_total'):.0f}"),
        ("first token", _percentiles(recent, "time_to_first_token_seconds")),
        ("between tokens", _percentiles(recent, "inter_token_latency_seconds")),
        ("whole request", _percentiles(recent, "e2e_request_latency_seconds")),
        ("step", _stages(recent)),
        *_speculation(now, recent),
    ]


def _ended(now: Snapshot) -> str:
    counts = now.by("request_success_total", "finished_reason")
    return ", ".join(f"{count:.0f} {reason}" for reason, count in counts.items() if count) or "none yet"


def _speeds(recent: Snapshot, seconds: float) -> str:
    generated, prompt = recent.value("generation_tokens_total"), recent.value("prompt_tokens_total")
    if not seconds:
        return f"{generated:.0f} generated, {prompt:.0f} of prompts"
    return f"{generated / seconds:.1f}/s generated, {prompt / seconds:.1f}/s of prompts"


def _kv_cache(now: Snapshot) -> str:
    total, free = now.value("kv_blocks"), now.value("kv_blocks_free")
    return f"{_bar(1 - free / total if total else 0.0)}  {total - free:.0f} of {total:.0f} blocks"


def _bar(share: float) -> str:
    filled = round(share * _BAR_WIDTH)
    return "█" * filled + "·" * (_BAR_WIDTH - filled) + f" {share:.0%}"


def _prefix_cache(recent: Snapshot) -> str:
    asked, found = recent.value("prefix_cache_queries_total"), recent.value("prefix_cache_hits_total")
    return f"{found / asked:.0%} of {asked:.0f} prompt tokens reused" if asked else "-"


def _percentiles(recent: Snapshot, name: str) -> str:
    values = [(share, recent.quantile(name, share / 100)) for share in (50, 90, 99)]
    return ", ".join(f"p{share} {_duration(value)}" for share, value in values if value is not None) or "-"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _stages(recent: Snapshot) -> str:
    steps = recent.value("steps_total")
    if not steps:
        return "-"
    stages = recent.by("step_seconds_total", "stage")
    return ", ".join(f"{stage} {1000 * spent / steps:.2f} ms" for stage, spent in stages.items())


def _speculation(now: Snapshot, recent: Snapshot) -> list[tuple[str, str]]:
    info = now.labels("speculation_info")
    proposer = info[0]["proposer"] if info else ""
    if not proposer:
        return [("speculation", "off")]
    state = "on"
    if now.value("speculation_disabled"):
        state = "switched off after too many faults"
    elif now.value("speculation_paused"):
        state = "paused: it does not pay now"
    lines = [
        (
            "speculation",
            f"{proposer}, {info[0]['num_speculative_tokens']} tokens, verifier {info[0]['verifier']}: {state}",
        )
    ]
    drafts = recent.value("spec_decode_num_drafts_total")
    if drafts:
        accepted = recent.value("spec_decode_num_accepted_tokens_total")
        drafted = recent.value("spec_decode_num_draft_tokens_total")
        lines.append(
            ("acceptance length", f"{1 + accepted / drafts:.2f} ({accepted:.0f} of {drafted:.0f} draft tokens)")
        )
        per_position = recent.by("spec_decode_num_accepted_tokens_per_pos_total", "position")
        shares = [per_position[key] / drafts for key in sorted(per_position, key=int)]
        lines.append(("of all drafts, per position", " ".join(f"{100 * share:.0f}" for share in shares) + " %"))
    faults = now.by("proposer_faults_total", "proposer")
    if any(faults.values()):
        lines.append(("faults", ", ".join(f"{name} {count:.0f}" for name, count in faults.items())))
    return lines
