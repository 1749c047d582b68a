"""Every installed verifier in an engine: greedy output, the law of sampled output, and the labels of lossy ones."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.registry import Registry
from specdec.testing import LawProposer, MisreportingProposer, RandomProposer
from specdec.testing.laws import deviations
from specdec.testing.models import load_module
from tests.invariants.kit import OBJECTS, PROMPTS, VOCAB, Baseline, Runs, Start, installed, proposer_named, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=48)
LOSSY: dict[str, dict[str, Any]] = {"typical": {}, "synthetic": {"acceptance_length": 2.0}}
"""Lossy verifiers, with the options they need."""
LOSSLESS = [name for name in installed("verifier") if name not in LOSSY]


@pytest.mark.parametrize("verifier", [name for name in LOSSLESS if name != "match"])
@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "self"])
def test_greedy_equals_plain(
    start: Start, baseline: Baseline, model: str, runs: Runs, verifier: str, name: str
) -> None:
    """I1, whoever drafts; `match` is tested so elsewhere."""
    engine = start(proposer_named(name, model, runs), verifier=verifier)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))


@pytest.mark.parametrize("rule", ["one_hot", "recursive"])
def test_greedy_trees(start: Start, baseline: Baseline, rule: str) -> None:
    engine = start(
        RandomProposer(vocab_size=VOCAB, trees=True), verifier="rejection", verifier_options={"tree_rule": rule}
    )
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))


def draft_law(token_ids: np.ndarray) -> Tensor:
    """Logits by the last token alone; nothing that the target thinks."""
    return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(token_ids[-1])))


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_greedy_with_drawn_drafts(start: Start, baseline: Baseline, verifier: str) -> None:
    """Drafts that come with laws, some of them to greedy requests beside sampled ones."""
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    params = [GREEDY, sampled] * (len(PROMPTS) // 2)
    engine = start(LawProposer(draft_law), verifier=verifier)
    greedy = tokens(engine.generate(PROMPTS, params, use_tqdm=False))[::2]
    assert greedy == tokens(baseline(PROMPTS[::2], GREEDY))


ALLOWED = [5, 17, 40, 77, 90]
PROMPT = [17, 18]


@pytest.fixture(scope="module")
def law_of_three(model: str) -> Tensor:
    """float64 [5, 5, 5]: the target's law of three tokens after the prompt, over the allowed ones, at temperature 1."""
    module = load_module(model)

    @torch.inference_mode()
    def following(text: list[int]) -> Tensor:
        logits = module(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, -1, ALLOWED]
        return logits.double().softmax(dim=-1)

    law = torch.empty(5, 5, 5, dtype=torch.float64)
    first = following([])
    for i, a in enumerate(ALLOWED):
        second = following([a])
        for j, b in enumerate(ALLOWED):
            law[i, j] = first[i] * second[j] * following([a, b])
    return law


def sampled_texts(start: Start, proposer: Any, verifier: str, count: int) -> Tensor:
    """Three tokens of many requests, as indices into the allowed ones."""
    engine = start(proposer, k=2, verifier=verifier)
    params = [
        SamplingParams(temperature=1.0, max_tokens=3, seed=seed, allowed_token_ids=ALLOWED, ignore_eos=True)
        for seed in range(count)
    ]
    outputs = tokens(engine.generate([PROMPT] * count, params, use_tqdm=False))
    place = {token: i for i, token in enumerate(ALLOWED)}
    return torch.tensor([[place[token] for token in text] for text in outputs])


def allowed_law(token_ids: np.ndarray) -> Tensor:
    """A law over tokens of which some are allowed."""
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[*ALLOWED[:4], 3]] = 1.5 * torch.randn(5, generator=torch.Generator().manual_seed(int(token_ids[-1])))
    return logits


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_the_law_of_drawn_drafts(start: Start, law_of_three: Tensor, verifier: str) -> None:
    """I2: sampled text has the target's law, although a third of the drafts' mass is on what the target never says."""
    texts = sampled_texts(start, LawProposer(allowed_law), verifier, 1000)
    assert deviations(texts, law_of_three) == []


@pytest.mark.slow
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("method", ["probabilistic", "coupled"])
def test_the_law_with_many_texts(start: Start, law_of_three: Tensor, verifier: str, method: str) -> None:
    texts = sampled_texts(start, LawProposer(allowed_law, method=method), verifier, 20_000)
    assert deviations(texts, law_of_three) == []


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_proposer_that_misreports_its_law_is_found(start: Start, law_of_three: Tensor, verifier: str) -> None:
    texts = sampled_texts(start, MisreportingProposer(allowed_law, warmth=0.3), verifier, 1000)
    assert deviations(texts, law_of_three) != []


def test_match_does_not_trust_reported_laws(start: Start, law_of_three: Tensor) -> None:
    texts = sampled_texts(start, MisreportingProposer(allowed_law, warmth=0.3), "match", 1000)
    assert deviations(texts, law_of_three) == []


@pytest.mark.parametrize("verifier", [name for name in LOSSY if name in installed("verifier")])
def test_lossy_verifiers_are_labelled(
    start: Start, caplog: pytest.LogCaptureFixture, verifier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the log, in the statistics, with every answer, and by `specdec config`."""
    from specdec.cli.main import main

    with caplog.at_level(logging.INFO, logger="specdec"):
        engine = start(RandomProposer(vocab_size=VOCAB), verifier=verifier, verifier_options=LOSSY[verifier])
    assert any(
        f"verifier '{verifier}'" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records
    )
    assert any(f"verifier {verifier} (lossy)" in record.getMessage() for record in caplog.records)
    output = engine.generate([3], SamplingParams(temperature=1.0, seed=1, max_tokens=5), use_tqdm=False)[0]
    assert not output.lossless
    assert not engine.stats().lossless
    options = [f"--set=verifier_options.{key}={value}" for key, value in LOSSY[verifier].items()]
    assert main(["config", "--model", "somewhere", "--verifier", verifier, *options]) == 0
    assert f"verifier {verifier}: lossy" in capsys.readouterr().out


def test_lossless_verifiers_are_not(start: Start) -> None:
    engine = start(RandomProposer(vocab_size=VOCAB), verifier="rejection")
    output = engine.generate([3], SamplingParams(temperature=1.0, seed=1, max_tokens=5), use_tqdm=False)[0]
    assert output.lossless
    assert engine.stats().lossless


def test_synthetic_acceptance_is_what_was_asked_for(start: Start) -> None:
    engine = start(
        RandomProposer(vocab_size=VOCAB),
        verifier="synthetic",
        verifier_options={"acceptance_rates": [1.0, 1.0, 1.0, 1.0]},
    )
    engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    stats = engine.stats()
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens > 0


def test_block_refuses_trees(start: Start) -> None:
    from specdec.errors import PluginUnsuitableError

    with pytest.raises(PluginUnsuitableError, match="drafts trees, which the verifier 'block' does not take"):
        start(RandomProposer(vocab_size=VOCAB, trees=True), verifier="block")


def test_the_built_in_verifiers_are_installed() -> None:
    names = {entry.name for entry in Registry().entries() if entry.kind == "verifier"}
    assert {"match", "rejection"} <= names
