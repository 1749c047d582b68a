"""How a benchmark talks to the engine under test: one JSON object a line, over the standard streams of a subprocess.

Each engine lives in an environment of its own, so this module and its users need the standard library alone. Requests:

    {"op": "load", ...settings}            -> {"versions": {...}, ...}
    {"op": "tokenise", "conversations"}    -> {"prompts": [[ids], ...]}
    {"op": "generate", "prompts", "max_tokens", "temperature", "ignore_eos"}
                                           -> {"seconds", "token_ids", "stats"}
    {"op": "memory"}                       -> {"resident_bytes", "peak_bytes"} of the process and its children

An answer with "error" ends the session. Whatever libraries print goes to standard error.
"""

import json
import os
import sys
import time
import traceback


class Peer:
    """An engine under test."""

    def load(self, settings):
        """Start the engine; return facts about it, "versions" among them."""
        raise NotImplementedError

    def tokenise(self, conversations):
        """Conversations -> lists of token ids, through the model's chat template."""
        raise NotImplementedError

    def generate(self, prompts, settings):
        """Generate for lists of token ids; return lists of output token ids. The time this takes is measured."""
        raise NotImplementedError

    def stats(self):
        """Totals of speculation since the start: num_drafts, num_draft_tokens, num_accepted_tokens; or nothing."""
        return {}


def serve(peer):
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    for line in sys.stdin:
        try:
            answer = _answer(peer, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(peer, request):
    op = request.pop("op")
    if op == "load":
        return peer.load(request)
    if op == "tokenise":
        return {"prompts": peer.tokenise(request["conversations"])}
    if op == "memory":
        return memory()
    before = peer.stats()
    begin = time.perf_counter()
    token_ids = peer.generate(request.pop("prompts"), request)
    seconds = time.perf_counter() - begin
    stats = {name: _minus(value, before.get(name)) for name, value in peer.stats().items()}
    return {"seconds": seconds, "token_ids": token_ids, "stats": stats}


def _minus(now, before):
    if before is None:
        return now
    if isinstance(now, list):
        before = before + [0] * (len(now) - len(before))
        return [a - b for a, b in zip(now, before)]  # noqa: B905 - same length
    return now - before


def memory():
    """Resident memory of this process and those it started, now and at each one's highest, in bytes."""
    resident = peak = 0
    for pid in _family(os.getpid()):
        fields = _status(pid)
        resident += int(fields.get("VmRSS", "0").split()[0]) * 1024
        peak += int(fields.get("VmHWM", "0").split()[0]) * 1024
    return {"resident_bytes": resident, "peak_bytes": peak}


def _family(root):
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            children.setdefault(int(_status(entry).get("PPid", "0")), []).append(int(entry))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def _status(pid):
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in status)}
    except OSError:
        return {}
