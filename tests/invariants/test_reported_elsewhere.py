"""Faults that users of other engines met, as small tests: trees, drafts that come and go, counts, block boundaries."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from specdec import SamplingParams
from specdec.drafting import Proposer
from specdec.testing import OracleProposer, SelfProposer, load_module
from specdec.testing.oracles import chain_draft
from specdec.types import Draft, ProposalInput, ProposerCapabilities
from tests.invariants.kit import (
    METHODS,
    PROMPTS,
    VOCAB,
    Baseline,
    Runs,
    Start,
    first_of,
    head,
    method_settings,
    oracle,
    tokens,
)

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

# --- trees ------------------------------------------------------------------------------------------

SHAPES = {
    "chain": [-1, 0, 1, 2],
    "star": [-1, -1, -1, -1],
    "binary": [-1, -1, *(i // 2 for i in range(12))],
    "comb": [-1, -1, 1, 1, 3, 3, 5, 5],
}
"""Parents of draft trees. Text goes on at the last child of each level."""


def last_path(parents: Sequence[int]) -> list[int]:
    """The node that is the last child of the root, its last child, and so on."""
    path: list[int] = []
    while True:
        children = [node for node, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
        if not children:
            return path
        path.append(children[-1])


class TreeOracle(Proposer):
    """Right at the last child of every level, wrong at all others."""

    capabilities = ProposerCapabilities(trees=True)

    def __init__(self, runs: list[list[int]], parents: list[int]) -> None:
        self._oracle = OracleProposer(runs, vocab_size=VOCAB)
        self._parents = parents
        self._path = last_path(parents)

    def propose(self, batch: ProposalInput) -> Draft:
        rows, parents = [], []
        for request_id, text, limit in zip(
            batch.request_ids, batch.token_ids, batch.max_draft_tokens.tolist(), strict=True
        ):
            right = self._oracle.draft_for(request_id, text, len(self._path))
            whole = len(right) == len(self._path) and limit >= len(self._parents)
            rows.append(self._tree(right) if whole else [])
            parents += self._parents if whole else []
        return evolve(chain_draft(rows), parents=torch.tensor(parents, dtype=torch.int32))

    def _tree(self, right: Sequence[int]) -> list[int]:
        depth = {node: level for level, node in enumerate(self._path)}
        levels = [len(list(self._above(node))) for node in range(len(self._parents))]
        return [
            right[depth[node]] if node in depth else (right[level] + 1 + node) % VOCAB
            for node, level in enumerate(levels)
        ]

    def _above(self, node: int) -> Any:
        while (node := self._parents[node]) >= 0:
            yield node


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_sibling_is_as_good_as_a_chain(start: Start, baseline: Baseline, runs: Runs, shape: str) -> None:
    """Known bug 65: a node's position is the text's length and its depth, wherever it lies in the tree."""
    parents = SHAPES[shape]
    plain = baseline(PROMPTS, GREEDY)
    known = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS, plain, strict=True)]
    engine = start(TreeOracle(known, parents), k=len(parents))
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(plain)
    assert engine.stats().num_drafts > len(PROMPTS)
    assert engine.stats().num_accepted_tokens == len(PROMPTS) * accepted_of(30, len(last_path(parents)))


def accepted_of(num_tokens: int, depth: int) -> int:
    """Accepted tokens of a text whose drafts are all right; near its end a tree is as deep as there are tokens left."""
    left, accepted = num_tokens - 1, 0  # prefill gives the first
    while left:
        taken = min(depth, left - 1)
        accepted += taken
        left -= taken + 1
    return accepted


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_the_last_trees_are_whole_as_far_as_they_reach(
    start: Start, baseline: Baseline, runs: Runs, limit: str
) -> None:
    """A tree may have more nodes than tokens are left, and none that is deeper; a text's last positions hold fewer."""
    prompt, num_tokens = PROMPTS[1], 14
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    plain = baseline([prompt], params)[0].outputs[0].token_ids
    settings = {"max_model_len": len(prompt) + num_tokens} if limit == "max_model_len" else {}
    engine = start(TreeOracle([[*prompt, *plain]], SHAPES["binary"]), k=14, **settings)
    output = engine.generate(prompt, params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == plain
    spec = output.spec_stats
    if limit == "max_tokens":  # 4 tokens three times, then one
        assert spec.num_draft_tokens_per_pos == (6, 12, 24)
        assert spec.num_accepted_tokens_per_pos == (3, 3, 3)
    else:  # 12 positions and one for the last token, too few for 14 nodes
        assert spec.num_drafts == 0


def test_later_requests_use_what_accepted_branches_left(start: Start, baseline: Baseline, model: str) -> None:
    """Known bug 68: K/V of an accepted branch is moved to where a chain's would be: a cached prefix of it is right."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = baseline(PROMPTS[:3], params)
    known = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS[:3], plain, strict=True)]
    engine = start(TreeOracle(known, SHAPES["comb"]), k=8, block_size=4)
    engine.generate(PROMPTS[:3], params, use_tqdm=False)
    again = [[*text, 7] for text in known]
    outputs = engine.generate(again, SamplingParams(temperature=0, max_tokens=4, logprobs=0), use_tqdm=False)
    reference = load_module(model).requires_grad_(False)
    for text, prompt, output in zip(again, PROMPTS, outputs, strict=False):
        assert output.num_cached_tokens > len(prompt) + 24, "the output's blocks were cached"
        choice = output.outputs[0]
        logits = reference(torch.tensor([[*text, *choice.token_ids]])).logits[0].double().log_softmax(dim=-1)
        for place, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs or (), strict=True)):
            assert found[token].logprob == pytest.approx(float(logits[len(text) - 1 + place, token]), abs=1e-4)


@pytest.mark.parametrize("tree", [{}, {"tree_top_k": 3, "tree_depth": 3}], ids=["chain", "tree"])
def test_a_head_without_numbers_costs_only_speculation(
    start: Start, baseline: Baseline, model: str, tmp_path: Path, tree: dict[str, Any]
) -> None:
    """Known bug 68 too: NaN logits of a head neither loop nor show."""
    path = Path(head("eagle3", model))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], torch.nan)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    speculative = {"method": "eagle3", "model": str(tmp_path), "speculation": "always", **tree}
    engine = start(speculative_config={"num_speculative_tokens": 5, **speculative})
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert engine.stats().num_proposer_faults == 0


# --- drafts that come and go ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        m if m in ("draft_model", "eagle3", "suffix, trees") else pytest.param(m, marks=pytest.mark.slow)
        for m in METHODS
    ],
)
def test_lengths_that_change_while_running(
    start: Start, baseline: Baseline, model: str, other_model: str, method: str
) -> None:
    """Known bug 70: whole drafts, one token, none: whatever the number of requests asks for, in any order."""
    settings = method_settings(method, 4, model, other_model)
    speculative = settings["speculative_config"]
    k = speculative["num_speculative_tokens"]
    speculative["num_speculative_tokens_per_batch_size"] = [[1, 1, k], [2, 3, 1], [4, 5, 0], [6, 64, k - 1]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 4, 22, 8, 26, 12, 16, 40)]
    engine = start(**settings)
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == tokens(baseline(PROMPTS, params))
    assert engine.stats().num_proposer_faults == 0


def test_acceptance_comes_back_after_a_busy_time(start: Start, model: str) -> None:
    """Known bug 71: while others keep drafting off, the drafter's K/V falls behind; it must catch up without holes."""
    speculative = {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": 4,
        "speculation": "always",
        "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 64, 0]],
    }
    engine = start(speculative_config=speculative)
    lengths = [80, 80, *[20] * 6]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    for output in outputs[:2]:
        spec = output.spec_stats
        assert spec.num_drafts >= 10
        assert spec.num_accepted_tokens == spec.num_draft_tokens
    assert engine.stats().num_proposer_faults == 0


@pytest.mark.parametrize("budget", first_of(3, 5, 8))
def test_the_model_is_only_fed_tokens(
    start: Start, baseline: Baseline, runs: Runs, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Known bug 77: requests that wait for their turn keep no placeholder: every id is one of the vocabulary."""
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.5, bad_words=["a", "bc"]),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    ] * (len(PROMPTS) // 2)
    engine = start(oracle(runs, 2), max_num_batched_tokens=budget, max_num_seqs=budget, block_size=4)
    target = engine._engine.core.parts.target
    forward, fed = target.forward, []

    def seen(batch: Any, *args: Any, **options: Any) -> Any:
        fed.append(batch.input_ids.clone())
        return forward(batch, *args, **options)

    monkeypatch.setattr(target, "forward", seen)
    assert tokens(engine.generate(PROMPTS, params, use_tqdm=False)) == tokens(baseline(PROMPTS, params))
    ids = torch.cat(fed)
    assert len(fed) > 20
    assert int(ids.min()) >= 0
    assert int(ids.max()) < VOCAB


class OftenRight(Proposer):
    """Drafts of full length in which each token is right with probability 0.7."""

    def __init__(self, runs: list[list[int]]) -> None:
        self._oracle = OracleProposer(runs, vocab_size=VOCAB)

    def propose(self, batch: ProposalInput) -> Draft:
        drafts = []
        for request_id, text, limit in zip(batch.request_ids, batch.token_ids, batch.max_draft_tokens, strict=True):
            right = np.array(self._oracle.draft_for(request_id, text, int(limit)))
            wrong = np.random.default_rng(len(text)).random(len(right)) > 0.7
            drafts.append(((right + wrong) % VOCAB).tolist())
        return chain_draft(drafts)


class Clock:
    """Goes on by 1 ms and 1 ms for each token when the target runs, and by 1 us whenever somebody looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(time, "perf_counter", self._now)
        self._patch = monkeypatch

    def _now(self) -> float:
        self.seconds += 1e-6
        return self.seconds

    def run(self, engine: Any, params: SamplingParams) -> tuple[float, list[list[int]]]:
        """The time that decoding takes, without prompts, and its tokens."""
        target = engine._engine.core.parts.target
        forward = target.forward

        def timed(batch: Any) -> Any:
            self.seconds += 1e-3 + 1e-3 * len(batch.input_ids)
            return forward(batch)

        self._patch.setattr(target, "forward", timed)
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        begin = self.seconds
        found = tokens(engine.generate(PROMPTS, params, use_tqdm=False))
        return self.seconds - begin, found


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_drafts_that_cannot_pay_are_given_up(
    start: Start, baseline: Baseline, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    """Known bug 88: good drafts on a model whose steps take as long as they have tokens. Time is counted work."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    plain = baseline(PROMPTS, params)
    known = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS, plain, strict=True)]
    clock, seconds = Clock(monkeypatch), {}
    for mode in ("off", "always", "auto"):
        speculative = {"num_speculative_tokens": 4, "speculation": mode}
        settings = {} if mode == "off" else {"proposer": OftenRight(known), "speculative_config": speculative}
        engine = start(**settings, max_num_seqs=max_num_seqs)
        seconds[mode], found = clock.run(engine, params)
        assert found == tokens(plain)
        if mode == "always":
            assert engine.stats().acceptance_rate_per_pos[0] > 0.6
    assert seconds["always"] > 1.1 * seconds["off"]
    assert seconds["auto"] < 1.05 * seconds["off"]


# --- counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", first_of(3, *{1, 2, 4, 5, 6, 7, 8}))
def test_what_is_cut_is_not_counted(start: Start, baseline: Baseline, runs: Runs, stop_at: int) -> None:
    """Known bug 73: accepted tokens beyond the end of a request are in no counter: parts never exceed the whole."""
    prompt = PROMPTS[2]
    run = runs([prompt])[0]
    emitted = run[len(prompt) :]
    stop = emitted[stop_at - 1]
    expected = emitted[: emitted.index(stop) + 1]
    engine = start(oracle(runs, None, [prompt]), k=5)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
    output = engine.generate(prompt, params, use_tqdm=False)[0]
    choice, stats = output.outputs[0], engine.stats()
    assert choice.token_ids == expected
    assert stats.num_generated_tokens == len(choice.token_ids)
    accepted = sum(origin >= 0 for origin in choice.token_origins)
    assert output.spec_stats.num_accepted_tokens == stats.num_accepted_tokens == accepted
    assert sum(stats.num_accepted_tokens_per_pos) == accepted <= len(choice.token_ids)


# --- lengths ----------------------------------------------------------------------------------------


def test_a_long_list_drafted_by_the_target_itself(start: Start, model: str) -> None:
    """Known bug 4: 150 tokens in chunks, then whole drafts: each row of a verify step has its position and context."""
    prompt = [token for line in range(25) for token in (10 + line, 4, 60 + line % 7, 61, 62, 5)]
    engine = start(SelfProposer(model), k=4, max_num_batched_tokens=64)
    engine.generate(prompt, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True), use_tqdm=False)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 32
    assert stats.num_drafts == 8


@pytest.mark.parametrize("right", first_of(2, 0, 1, 3))
def test_texts_that_end_at_a_block_boundary(start: Start, baseline: Baseline, right: int) -> None:
    """Known bug 83: however many tokens are accepted when a text reaches a multiple of the block size."""
    prompts = [list(range(20, 20 + length)) for length in range(5, 10)]
    plain = baseline(prompts, GREEDY)
    known = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, plain, strict=True)]
    engine = start(OracleProposer(known, vocab_size=VOCAB, right=right), k=3, block_size=8)
    for prompt, expected in zip(prompts, plain, strict=True):
        assert engine.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert tokens(engine.generate(prompts, GREEDY, use_tqdm=False)) == tokens(plain)


# --- starts -----------------------------------------------------------------------------------------

COUNT = """
import sys, torch
torch.set_num_threads(1)
from specdec import LLM, SamplingParams
from specdec.testing import SelfProposer, use_proposer
settings = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 128, "stat_loggers": ()}
params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
drafter = use_proposer(SelfProposer(sys.argv[1]), 3)
with LLM(sys.argv[1], proposer_time_budget=0, **settings, **drafter) as llm:
    output = llm.generate([[5, 9, 5, 9, 11]], params, use_tqdm=False)
    print(output[0].outputs[0].token_ids, llm.stats().num_draft_tokens, llm.stats().num_accepted_tokens)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_fresh_start_accepts_the_same(model: str) -> None:
    """Known bug 64: nothing depends on memory as a process happens to find it."""
    command = [sys.executable, "-c", COUNT, model]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(20)]
    assert set(said) == {said[0]}
    assert said[0].split("]")[1].split() == ["6", "6"]  # one token, two full drafts and their bonus tokens, one token
