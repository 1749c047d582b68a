"""Recursive rejection of trees: against a walk in plain Python with the same noise, and the law of what comes out."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from specdec.drafting.sampling import DraftSampler
from specdec.sampling.noise import Purpose, race, uniforms
from specdec.testing.laws import TwoLaws, deviations, sampling_of, step_rows
from specdec.testing.steps import RandomStep, runs_of
from specdec.types import Draft, Rows
from specdec.verify.config import RejectionConfig
from specdec.verify.rejection import RejectionVerifier

VERIFIER = RejectionVerifier(RejectionConfig(tree_rule="recursive"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def walk(rows: Rows, row: int, tokens: list[int], parents: list[int], laws: Tensor, seed: int) -> tuple[list, list]:
    """One request: its path and its tokens."""
    path: list[int] = []
    node = -1
    while True:
        law = rows.logits[row + node + 1].double().softmax(dim=-1)
        position = rows.positions[row + node + 1][None]
        chances = uniforms(torch.tensor([seed]), position, len(tokens) + 1, Purpose.ACCEPT)[0]
        children = [child for child, parent in enumerate(parents) if parent == node]
        for trial, child in enumerate(children):
            if float(chances[trial]) * float(laws[child, tokens[child]]) <= float(law[tokens[child]]):
                break
            law = (law - laws[child].double()).clamp(min=0)
            law = law / law.sum()
        else:
            purpose = Purpose.RECOVER if children else Purpose.SAMPLE
            last, _ = race(law.log()[None], torch.ones(1), torch.tensor([seed]), position, purpose)
            return path, [*(tokens[i] for i in path), int(last)]
        node = child
        path.append(child)


def test_against_a_walk_in_plain_python() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [[-1, -1, 0, 0, 1, 2], [], [-1, 0, 1], [-1, -1, -1], [-1, 0, -1, 2, 2, 3, 5]] * 40
    vocab = 5
    tokens = [torch.randint(0, vocab, (len(tree),), generator=generator).tolist() for tree in trees]
    nodes = sum(len(tree) for tree in trees)
    laws = torch.randn(nodes, vocab, generator=generator).softmax(dim=-1)
    depths = []
    for tree in trees:
        depth = [0]
        for parent in tree:
            depth.append(depth[parent + 1] + 1)
        depths += depth
    draft = Draft(
        token_ids=torch.tensor([t for row in tokens for t in row]),
        num_draft_tokens=torch.tensor([len(tree) for tree in trees]).int(),
        parents=torch.tensor([p for tree in trees for p in tree]).int(),
        draft_probs=laws,
    )
    logits = torch.randn(nodes + len(trees), vocab, generator=generator)
    rows = step_rows(logits, draft, torch.arange(len(trees)) + 4, torch.tensor(depths))
    verdict = VERIFIER.verify(rows, draft, sampling_of(torch.arange(len(trees)) * 11))
    assert verdict.accepted_nodes is not None
    node = row = 0
    for r, tree in enumerate(trees):
        path, emitted = walk(rows, row, tokens[r], tree, laws[node : node + len(tree)], r * 11)
        assert verdict.token_ids[r, : int(verdict.num_tokens[r])].tolist() == emitted
        assert verdict.accepted_nodes[r, : len(path)].tolist() == path
        node, row = node + len(tree), row + len(tree) + 1
    assert max(verdict.num_tokens.tolist()) >= 3


def test_a_chain_as_a_tree_gives_the_chains_verdict() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 0, 2, 4] * 20)
    nodes = int(counts.sum())
    laws = torch.randn(nodes, 6, generator=generator).softmax(dim=-1)
    logits = torch.randn(nodes + len(counts), 6, generator=generator)
    chain = Draft(
        token_ids=torch.multinomial(laws, 1, generator=generator)[:, 0], num_draft_tokens=counts.int(), draft_probs=laws
    )
    parents = torch.tensor([p for count in counts.tolist() for p in range(-1, count - 1)]).int()
    tree = Draft(token_ids=chain.token_ids, num_draft_tokens=chain.num_draft_tokens, parents=parents, draft_probs=laws)
    rows, sampling = step_rows(logits, chain, torch.arange(len(counts)) + 3), sampling_of(torch.arange(len(counts)))
    one, other = VERIFIER.verify(rows, chain, sampling), VERIFIER.verify(rows, tree, sampling)
    assert torch.equal(one.num_tokens, other.num_tokens)
    assert torch.equal(one.token_ids, other.token_ids)


def first_two(count: int, *, reported: bool = True) -> Tensor:
    """The first two tokens of a step over trees of three siblings drawn without replacement; the target goes on."""
    laws = TwoLaws.random(5, seed=4, agreement=0.0)
    logits = laws.draft[0, 0].log().float().expand(count, -1)
    seeds = torch.arange(count) * 7 + 1
    positions = torch.full((count,), 9)
    tokens, drawn = DraftSampler("probabilistic").choose_children(
        logits, torch.ones(count), seeds, positions, 3, draft_position=0
    )
    if not reported:
        drawn = drawn[:, :1].expand(-1, 3, -1)
    draft = Draft(
        token_ids=tokens.flatten(),
        num_draft_tokens=torch.full((count,), 3).int(),
        parents=torch.tensor([-1, -1, -1]).repeat(count).int(),
        draft_probs=drawn.flatten(0, 1),
    )
    rows = torch.stack([laws.target[0, 0].expand(count, -1), *(laws.target[0][tokens[:, j]] for j in range(3))], dim=1)
    depths = torch.tensor([0, 1, 1, 1]).repeat(count)
    step = step_rows(rows.log().float().flatten(0, 1), draft, positions, depths)
    verdict = VERIFIER.verify(step, draft, sampling_of(seeds))
    texts = verdict.token_ids[:, :2].clone()
    short = verdict.num_tokens == 1
    generator = torch.Generator().manual_seed(5)
    texts[short, 1] = torch.multinomial(laws.target[0][texts[short, 0]], 1, generator=generator)[:, 0]
    return texts


LAW = TwoLaws.random(5, seed=4, agreement=0.0).law_of_texts(2)


def test_siblings_drawn_without_replacement() -> None:
    assert deviations(first_two(10_000), LAW) == []


def test_the_nodes_law_in_place_of_the_childrens_is_found() -> None:
    assert deviations(first_two(6_000, reported=False), LAW) != []


def test_all_nodes_are_tried_when_the_depth_is_known() -> None:
    """``max_draft_tokens`` bounds the path that can be accepted, not the nodes that are tried."""
    for seed in range(8):
        step = RandomStep.of(seed, 5, trees=True, laws=True, num_requests=20)
        unknown = attrs.evolve(step.rows, max_draft_tokens=None)
        runs = [runs_of(VERIFIER.verify(rows, step.draft, step.sampling)) for rows in (step.rows, unknown)]
        assert runs[0] == runs[1]
