"""Runs one drawn case and says what is wrong with it.

A case is an engine with some proposer and verifier, and requests that arrive, are preempted and aborted at random,
twice over (the second time with what the first left in the caches, which are emptied now and then). In float32, what
comes out must be the text that an engine without speculation gives for each request alone: always at temperature 0, and
with the verifier `match` also when sampled. What is read in parts must be the whole. Nothing may leak, and the counts
must add up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from attrs import define, field, frozen

from specdec import LLM, SamplingParams
from specdec.drafting import Proposer
from specdec.errors import CapacityError, SpecdecError
from specdec.testing import GappyProposer, OracleProposer, RandomProposer, WrongProposer
from tests.fuzz import draw
from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.proposers import TreeOracle

MOST_STEPS = 6000
"""Steps after which requests are taken to be stuck."""
VERIFIERS = (*["match"] * 5, "rejection", "rejection", "block")


@frozen
class Result:
    """What a case did."""

    description: str
    problems: tuple[str, ...] = ()
    refused: str | None = None
    """Why the engine did not start with the drawn settings; that is no fault."""
    counts: tuple[int, ...] = (0, 0, 0, 0)
    """Drafts, accepted tokens, preemptions, cached tokens."""


class Fuzz:
    """Runs cases against plain engines that it keeps."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._plain: dict[str, LLM] = {}

    def run(self, seed: int) -> Result:
        """Draw a case and run it."""
        case = self._draw(seed)
        try:
            engine = _started(case.settings, case.proposer)
        except SpecdecError as error:
            return Result(case.description, refused=str(error).partition("\n")[0])
        with _warnings() as logged:
            try:
                problems = _Check(case, engine).run()
                stats = engine.stats()
            finally:
                engine.close()
        if problems:
            problems += [f"log: {line}" for line in logged[:4]]
        counts = (stats.num_drafts, stats.num_accepted_tokens, stats.num_preemptions, stats.num_cached_tokens)
        return Result(case.description, tuple(problems), None, counts)

    def close(self) -> None:
        """Close the plain engines."""
        for engine in self._plain.values():
            engine.close()
        self._plain.clear()

    def _draw(self, seed: int) -> _Case:
        random = Random(seed)
        target = draw.draw_target(random, self._checkpoints)
        verifier = random.choice(VERIFIERS)
        prompts = draw.draw_prompts(random, target.vocab_size)
        params, expected = [], []
        for prompt in prompts:
            wanted = draw.draw_params(
                random, target.vocab_size, lambda one, prompt=prompt: self._decode(target, prompt, one).outputs[0]
            )
            params.append(wanted)
            expected.append(self._decode(target, prompt, wanted))
        k, trees = random.randint(1, 8), verifier != "block"
        speculative: dict[str, Any] = {}
        proposer = None
        if random.random() < 0.2:
            runs = [
                [*prompt, *one.token_ids]
                for prompt, output in zip(prompts, expected, strict=True)
                for one in output.outputs
            ]
            proposer = _object(random, runs, target.vocab_size, trees=trees)
        else:
            methods = draw.MethodDraw(random, target, self._checkpoints, trees=trees)
            speculative, k = methods.draw(k)
        speculative["num_speculative_tokens"] = k
        speculative["speculation"] = random.choice(["always", "always", "always", "auto"])
        if random.random() < 0.1:
            speculative["num_speculative_tokens_per_batch_size"] = [[1, 2, k], [3, 64, random.randint(0, k)]]
        tables = speculative.get("proposers", [speculative])
        own = 1 + sum(table.get("method") in ("draft_model", "eagle", "eagle3") for table in tables)
        settings = draw.draw_engine(random, target, own * self._bytes_per_token(target), k)
        settings |= {"speculative_config": speculative, "verifier": verifier}
        if verifier == "rejection" and random.random() < 0.4:
            settings["verifier_options"] = {"tree_rule": random.choice(["one_hot", "recursive"])}
        name = type(proposer).__name__ if proposer else "+".join(str(table.get("method")) for table in tables)
        return _Case(
            description=f"seed {seed}: {target.architecture}, {name}, k={k}, {verifier}",
            random=random,
            settings=settings,
            proposer=proposer,
            k=k,
            members=[str(table["method"]) for table in tables] if "proposers" in speculative else [],
            prompts=prompts,
            params=params,
            expected=expected,
        )

    def _engine(self, target: draw.Target) -> LLM:
        if target.path not in self._plain:
            self._plain[target.path] = LLM(
                target.path,
                dtype="float32",
                max_model_len=draw.MAX_LEN,
                kv_cache_memory="2MiB",
                stat_loggers=(),
                attention_backend="sdpa",
            )
        return self._plain[target.path]

    def _decode(self, target: draw.Target, prompt: list[int], params: dict[str, Any]) -> Any:
        engine = self._engine(target)
        engine.reset_prefix_cache()
        return engine.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]

    def _bytes_per_token(self, target: draw.Target) -> int:
        return int(self._engine(target)._engine.core.parts.target.kv_bytes_per_token())


@frozen(kw_only=True)
class _Case:
    """A drawn case, with the right answers."""

    description: str
    random: Random
    settings: dict[str, Any]
    proposer: Proposer | None
    k: int
    members: list[str]
    prompts: list[list[int]]
    params: list[dict[str, Any]]
    expected: list[Any]

    def is_exact(self, index: int) -> bool:
        """Whether the verifier promises a request's very text, and not only its law."""
        return self.settings["verifier"] == "match" or self.params[index]["temperature"] == 0


def _object(random: Random, runs: list[list[int]], vocab_size: int, *, trees: bool) -> Proposer:
    seed = random.randrange(10**6)
    makers: list[Callable[[], Proposer]] = [
        lambda: OracleProposer(runs, vocab_size=vocab_size, right=random.choice([None, 0, 1, 2, 3])),
        lambda: GappyProposer(OracleProposer(runs, vocab_size=vocab_size)),
        lambda: RandomProposer(vocab_size, seed=seed, trees=trees),
        lambda: WrongProposer(5),
    ]
    if trees:
        makers += [lambda: TreeOracle(runs, vocab_size=vocab_size, seed=seed)] * 3
    return random.choice(makers)()


def _started(settings: dict[str, Any], proposer: Proposer | None) -> LLM:
    """The engine; with more K/V where the drawn amount holds no request."""
    for _ in range(6):
        try:
            return LLM(**settings, **({"proposer": proposer} if proposer else {}))
        except CapacityError:
            settings["kv_cache_memory"] = int(settings["kv_cache_memory"] * 1.4)
    return LLM(**settings, **({"proposer": proposer} if proposer else {}))


@define
class _Check:
    """Runs the requests of a case through an engine."""

    case: _Case
    engine: LLM
    problems: list[str] = field(factory=list)

    def run(self) -> list[str]:
        """What is wrong; nothing, when all is well."""
        delivered = 0
        for wave in ("first time", "again"):
            for index, group in self._wave():
                output = group.output()
                delivered += sum(len(one.token_ids) for one in output.outputs)
                self.problems += [f"{wave}, request {index}: {what}" for what in self._compare(index, output)]
            stats = self.engine.stats()
            if stats.free_blocks != stats.total_blocks or stats.num_running or stats.num_waiting:
                self.problems.append(f"{wave}: {stats.free_blocks} of {stats.total_blocks} blocks are free")
        self._check_counts(delivered)
        return self.problems

    def _wave(self) -> list[tuple[int, Any]]:
        """All requests in some order; they arrive and leave while others run."""
        random, frontend = self.case.random, self.engine._engine
        order = list(range(len(self.case.prompts)))
        random.shuffle(order)
        by_priority = self.case.settings["scheduling_policy"] == "priority"
        waiting = [
            (
                index,
                frontend.prepare(
                    self.case.prompts[index],
                    SamplingParams(**self.case.params[index]),
                    None,
                    random.randint(0, 3) if by_priority else 0,
                    draw.draw_speculation(random, self.case.k, self.case.members),
                ),
                random.random() < 0.12,
            )
            for index in order
        ]
        done, steps = [(index, group) for index, group, _ in waiting], 0
        running: list[Any] = []
        read = {group.request_id: [_Parts() for _ in group.requests] for _, group in done}
        while waiting or frontend.core.has_work:
            while waiting and random.random() < 0.6:
                _, group, aborts = waiting.pop(0)
                frontend.submit(group)
                running += [group] if aborts else []
            if random.random() < 0.03:
                self.engine.reset_prefix_cache()
            for group in frontend.step():
                if random.random() < 0.7:
                    _read(read, group)
            steps += 1
            if steps > MOST_STEPS:
                self.problems.append("no progress")
                break
            for group in running:
                if not group.is_finished and random.random() < 0.1:
                    frontend.abort(group.request_id)
        for index, group in done:
            _read(read, group)
            whole = group.output().outputs
            self.problems += [
                f"request {index}, read in parts: {parts}, whole: {one}"
                for parts, one in zip(read[group.request_id], whole, strict=True)
                if not parts.are(one)
            ]
        return done

    def _compare(self, index: int, output: Any) -> Iterator[str]:
        expected = self.case.expected[index]
        for ours, right in zip(output.outputs, expected.outputs, strict=True):
            aborted = ours.finish_reason == "abort"
            if not self.case.is_exact(index):
                if ours.finish_reason not in ("stop", "length", "abort"):
                    yield f"ended by {ours.finish_reason}: {ours.error}"
            elif aborted:
                if ours.token_ids != right.token_ids[: len(ours.token_ids)]:
                    yield f"{self.case.params[index]}\n  aborted with {ours.token_ids}\n  plain {right.token_ids}"
            elif _facts(ours) != _facts(right):
                yield f"{self.case.params[index]}\n  {_facts(ours)}\n  plain {_facts(right)}"
            elif not _close(ours.logprobs, right.logprobs):
                yield f"{self.case.params[index]}: log-probabilities\n  {ours.logprobs}\n  plain {right.logprobs}"
        if all(one.finish_reason != "abort" for one in output.outputs) and not _close(
            output.prompt_logprobs, expected.prompt_logprobs
        ):
            yield f"log-probabilities of the prompt\n  {output.prompt_logprobs}\n  plain {expected.prompt_logprobs}"

    def _check_counts(self, delivered: int) -> None:
        stats = self.engine.stats()
        drafted, accepted = stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos
        wrong = {
            "proposer faults": stats.num_proposer_faults > 0,
            "generated is not delivered": stats.num_generated_tokens != delivered,
            "accepted more than drafted": any(a > d for a, d in zip(accepted, drafted, strict=False)),
            "positions do not add up": (sum(drafted), sum(accepted))
            != (stats.num_draft_tokens, stats.num_accepted_tokens),
            "longer drafts than allowed": stats.num_draft_tokens > self.case.k * stats.num_drafts,
        }
        members = stats.proposer.get("members", {})
        wrong["a member failed"] = any(one["num_faults"] for one in members.values())
        if members:
            wrong["members do not add up"] = (
                sum(one["num_accepted_tokens"] for one in members.values()) > stats.num_accepted_tokens
            )
        self.problems += [f"{what}: {stats}" for what, is_so in wrong.items() if is_so]


@define
class _Parts:
    """An output read as it grows."""

    text: str = ""
    token_ids: list[int] = field(factory=list)
    logprobs: list[Any] = field(factory=list)

    def add(self, part: Any) -> None:
        """What is new."""
        self.text += part.text
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs or []

    def are(self, whole: Any) -> bool:
        """Whether that was all of it."""
        return (self.text, self.token_ids, self.logprobs) == (whole.text, list(whole.token_ids), whole.logprobs or [])


def _read(read: dict[str, list[_Parts]], group: Any) -> None:
    """Take what is new in a group."""
    for parts, one in zip(read[group.request_id], group.output(only_new=True).outputs, strict=True):
        parts.add(one)


def _facts(one: Any) -> tuple[Any, ...]:
    return list(one.token_ids), one.text, one.finish_reason, one.stop_reason


def _close(ours: Any, right: Any) -> bool:
    """Whether log-probabilities agree; of equally likely tokens another may be listed."""
    if ours is None or right is None:
        return ours is right
    if len(ours) != len(right):
        return False
    for a, b in zip(ours, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        both = set(a) & set(b)
        if len(set(a) ^ set(b)) > 2 or any(
            a[token].logprob != b[token].logprob and not abs(a[token].logprob - b[token].logprob) < 2e-3
            for token in both
        ):
            return False
    return True


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what the engine warns of."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            lines.append(record.getMessage()[:300] + cause[:500])

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("specdec")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
