"""The draft length follows cost and acceptance; time is simulated, nothing here depends on the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from attrs import define, field

from specdec.control import AdaptiveControl, Control, FixedControl, Schedule
from specdec.control.acceptance import Acceptance, TreeAcceptance


@define
class World:
    """What steps cost and which draft tokens are right."""

    step: Callable[[int, int], float]
    """(requests, rows) -> seconds."""
    draft: Callable[[int, int], float]
    """(requests, longest draft) -> seconds."""
    accept: Callable[[int, int], float]
    """(time step, request) -> conditional acceptance of every position."""
    fill: Callable[[int, int], float] = lambda now, request: 1.0
    """(time step, request) -> probability that the proposer finds a draft at all."""
    noise: float = 0.03
    pauses: float = 0.01
    """Probability that a step takes ten times as long, as when the system does something else."""
    seconds: float = 0.0
    tokens: int = 0
    rng: np.random.Generator = field(factory=lambda: np.random.default_rng(7))

    def noisy(self, seconds: float) -> float:
        factor = float(np.exp(self.noise * self.rng.standard_normal()))
        return seconds * factor * (10.0 if self.rng.random() < self.pauses else 1.0)


def run(world: World, control: Control, batch: int, k: int, steps: int) -> list[float]:
    """Run steps; the mean draft length of each. `World.seconds` and ``tokens`` add up without noise."""
    ids = [f"r{i}" for i in range(batch)]
    counts = [0] * batch
    mean_lengths = []
    for now in range(steps):
        rows = batch + sum(counts)
        outcomes = []
        for i, count in enumerate(counts):
            accepted = 0
            while accepted < count and world.rng.random() < world.accept(now, i):
                accepted += 1
            world.tokens += accepted + 1
            if count:
                outcomes.append((ids[i], count, range(accepted)))
        seconds = world.step(batch, rows)
        world.seconds += seconds
        prefill = now == 0
        control.record_step(batch, 0 if prefill else rows, world.noisy(seconds), outcomes)
        limits = control.limits(ids, [k] * batch)
        counts = [limit if limit and world.rng.random() < world.fill(now, i) else 0 for i, limit in enumerate(limits)]
        mean_lengths.append(sum(limits) / batch)
        if any(limits):
            asked = [i for i, limit in enumerate(limits) if limit]
            seconds = world.draft(len(asked), max(limits))
            world.seconds += seconds
            control.record_draft(
                [ids[i] for i in asked], [limits[i] for i in asked], [counts[i] for i in asked], world.noisy(seconds)
            )
    return mean_lengths


def expected_rate(world: World, batch: int, k: int, acceptances: Sequence[float], fill: float = 1.0) -> float:
    """Tokens per second with the same k for all, per request, in expectation over acceptances of equal weight."""
    if k == 0:
        return batch / world.step(batch, batch)
    gained = np.mean([sum(a**i for i in range(1, k + 1)) for a in acceptances]) * fill
    rows = np.random.default_rng(0).binomial(batch, fill, 2000) * k + batch
    seconds = world.draft(batch, k) + np.mean([world.step(batch, int(n)) for n in rows])
    return float(batch * (1 + gained) / seconds)


K = 8
Cost = Callable[[int, int], float]

STEPS: dict[str, Cost] = {
    "flat": lambda requests, rows: 10e-3 * (1 + 0.004 * (rows - 1)) + 0.2e-3 * requests,
    "linear": lambda requests, rows: 10e-3 * (1 + 0.1 * (rows - 1)),
    "stairs": lambda requests, rows: 10e-3 * (1 + 0.5 * ((rows - 1) // 16)),
}
DRAFTS: dict[str, Cost] = {
    "lookup": lambda requests, longest: 0.05e-3,
    "model": lambda requests, longest: 0.8e-3 * longest,
    "one shot": lambda requests, longest: 1.5e-3,
}
NO_LIMIT = Schedule.parse(None, K)


def adaptive() -> AdaptiveControl:
    return AdaptiveControl(NO_LIMIT, K, most_rows=32 * (K + 1))


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("draft", ["lookup", "model", pytest.param("one shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("step", "acceptance"), [("flat", 0.5), ("flat", 0.9), ("linear", 0.9)])
def test_close_to_the_best_fixed_length(step: str, draft: str, acceptance: float, batch: int) -> None:
    """After a while speed is within 6 % of the best k's, which differs between the cases from 1 to 8."""
    world = World(STEPS[step], DRAFTS[draft], lambda now, request: acceptance)
    best = max(expected_rate(world, batch, k, [acceptance]) for k in range(K + 1))
    control = adaptive()
    run(world, control, batch, K, 300)
    tokens, seconds = world.tokens, world.seconds
    run(world, control, batch, K, 900 if batch == 1 else 300)
    assert (world.tokens - tokens) / (world.seconds - seconds) > 0.94 * best


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("step", STEPS)
def test_nothing_accepted_costs_little(step: str, draft: str, batch: int) -> None:
    """From a cold start over 600 steps, exploration and probes included, less than 3 % is lost."""
    world = World(STEPS[step], DRAFTS[draft], lambda now, request: 0.0)
    control = adaptive()
    run(world, control, batch, K, 600)
    plain = batch / world.step(batch, batch)
    assert world.tokens / world.seconds > 0.97 * plain
    assert control.is_paused


@pytest.mark.parametrize("batch", [1, 8])
def test_follows_a_text_that_changes(batch: int) -> None:
    """Predictable, then not, then predictable again: drafting stops and comes back."""
    world = World(STEPS["flat"], DRAFTS["model"], lambda now, request: 0.9)
    control = adaptive()
    assert np.mean(run(world, control, batch, K, 300)[-50:]) > 3
    world.accept = lambda now, request: 0.02
    assert np.mean(run(world, control, batch, K, 400)[-50:]) < 0.5
    world.accept = lambda now, request: 0.9
    assert np.mean(run(world, control, batch, K, 600)[-50:]) > 3


def test_requests_get_lengths_of_their_own() -> None:
    """Where rows cost, predictable requests draft and the others do not."""
    world = World(STEPS["linear"], DRAFTS["lookup"], lambda now, request: 0.95 if request < 4 else 0.1)
    control = adaptive()
    run(world, control, 8, K, 300)
    limits = np.mean([control.limits([f"r{i}" for i in range(8)], [K] * 8) for _ in range(20)], axis=0)
    assert limits[:4].min() > limits[4:].max() + 0.5


def test_a_proposer_that_seldom_finds_anything_still_pays() -> None:
    """Lookup that finds something every tenth step, and then is right, is not given up."""
    world = World(STEPS["flat"], DRAFTS["lookup"], lambda now, request: 0.9, fill=lambda now, request: 0.1)
    control = adaptive()
    run(world, control, 1, K, 400)
    tokens, seconds = world.tokens, world.seconds
    run(world, control, 1, K, 1500)
    assert (world.tokens - tokens) / (world.seconds - seconds) > 1.2 / world.step(1, 1)


def test_a_first_draft_late_or_among_prompts() -> None:
    """Requests may begin plainly, and prompts may be in every step: then drafts are tried all the same."""
    control = adaptive()
    for _ in range(30):
        assert control.limits(["a"], [0]) == [0]
        control.record_step(1, 1, 1e-2, [])
    assert control.limits(["a", "b"], [0, K])[1] > 0
    control = adaptive()
    lengths = []
    for _ in range(30):
        control.record_step(2, 0, 1e-2, [])
        lengths.append(control.limits(["a", "b"], [K, K]))
    assert np.max(lengths) > 0


def test_caps_and_schedule_bind() -> None:
    world = World(STEPS["flat"], DRAFTS["lookup"], lambda now, request: 0.95)
    control = AdaptiveControl(Schedule.parse([[1, 4, 8], [5, 64, 2]], K), K, most_rows=72)
    assert max(run(world, control, 8, K, 60)) <= 2
    assert control.limits(["a", "b", "c"], [0, 1, 5])[0] == 0
    assert all(limit <= cap for limit, cap in zip(control.limits(["a", "b"], [1, 3]), [1, 3], strict=True))
    assert control.limits([], []) == []
    assert control.limits(["a"], [0]) == [0]


def test_ended_requests_are_forgotten() -> None:
    control = adaptive()
    for number in range(200):
        control.limits([f"{number}"], [K])
        control.record_draft([f"{number}"], [3], [3], 1e-3)
        control.record_step(1, 4, 1e-2, [(f"{number}", 3, range(1))])
        control.finish(f"{number}")
    assert control._acceptance._counts.shape[1] == 16


def test_always_drafts_what_the_settings_say() -> None:
    control = FixedControl(Schedule.parse({"4": 2, "8": 0}, 5))
    assert control.limits(["a", "b", "c"], [5, 1, 0]) == [5, 1, 0]
    assert control.limits(["a"] * 4, [5] * 4) == [2] * 4
    assert control.limits(["a"] * 9, [5] * 9) == [0] * 9


def test_a_request_without_evidence_is_believed_to_be_like_the_others_but_less_surely() -> None:
    acceptance = Acceptance(K)
    for _ in range(20):
        acceptance.record_outcomes(["known"], np.array([2]), [range(2)])
    found = acceptance.estimate(["new", "known"])
    assert found.accept[0, 0] == pytest.approx(found.accept[1, 0], abs=0.05)
    assert found.spread[0, 0] > 1.5 * found.spread[1, 0]


TREE = (-1, -1, 0, 1, 2, 4, 5, 5)
"""Parents of the nodes of a tree in levels: the first node's line goes on for five levels."""


def tree_path(rng: np.random.Generator, size: int) -> list[int]:
    """The accepted path through the first nodes of `TREE`: of siblings the first is likelier."""
    path: list[int] = []
    while children := [node for node in range(size) if TREE[node] == (path[-1] if path else -1)]:
        chance = rng.random()
        if chance > 0.75:
            break
        path.append(children[-1] if chance < 0.2 else children[0])
    return path


def tree_run(control: Control, row_cost: float, steps: int) -> tuple[float, float]:
    """Tokens and seconds of steps in which a row more costs a share of a plain step."""
    rng, size, tokens, seconds = np.random.default_rng(3), 0, 0, 0.0
    for now in range(steps):
        path = tree_path(rng, size)
        took = 10e-3 * (1 + row_cost * size)
        tokens, seconds = tokens + len(path) + 1, seconds + took
        outcomes = [("r", size, path)] if size else []
        control.record_step(1, 1 + size if now else 0, took * float(np.exp(0.02 * rng.standard_normal())), outcomes)
        [size] = control.limits(["r"], [len(TREE)])
        control.record_draft(["r"], [size], [size], 0.1e-3)
    return tokens, seconds


@pytest.mark.parametrize("row_cost", [0.01, 0.04, 0.12, 0.5])
def test_trees_are_as_large_as_pays(row_cost: float) -> None:
    """Nodes count by how often they lie on the accepted path: speed is near the best fixed size's, whatever it is."""
    rates = []
    for size in range(len(TREE) + 1):
        rng = np.random.default_rng(5)
        gained = np.mean([len(tree_path(rng, size)) for _ in range(2000)])
        rates.append(float((1 + gained) / (10e-3 * (1 + row_cost * size))))
    control = AdaptiveControl(Schedule.parse(None, len(TREE)), len(TREE), most_rows=16, trees=True)
    tree_run(control, row_cost, 200)
    tokens, seconds = tree_run(control, row_cost, 800)
    assert tokens / seconds > 0.94 * max(rates)


def test_nodes_share_what_they_bring_until_it_falls() -> None:
    acceptance = TreeAcceptance(4)
    for number in range(400):
        path = [0, 2] if number % 2 else [1] if number % 4 else []
        acceptance.record_outcomes(["r"], np.array([3]), [path])
        acceptance.age(1)
    found = acceptance.estimate(["r"])
    assert found.accept[0, :3] == pytest.approx([0.5, 0.25, 0.5], abs=0.06)
    survival = found.survival(0.0)[0]
    assert survival[:3] == pytest.approx([0.5, 0.375, 0.375], abs=0.06)
    assert (np.diff(survival) <= 1e-12).all()
    assert (found.survival(-0.5)[0] < survival).all()
    assert (found.survival(1.0)[0, 1:] > survival[1:]).all()
