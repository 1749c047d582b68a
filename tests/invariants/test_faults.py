"""I11 and design §7: a proposer can lose its own speed, and nothing else."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.errors import EngineDeadError
from specdec.metrics.loggers import StatLogger
from specdec.metrics.stats import StepStats
from specdec.runner.drafting import DRAFTS_IN_VAIN
from specdec.testing import LIES, LyingProposer, RaisingProposer, SlowProposer
from specdec.types import Needs
from tests.invariants.kit import PROMPTS, VOCAB, Baseline, Runs, Start, oracle, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize("lie", sorted(LIES))
def test_lies_cost_only_speculation(
    start: Start, baseline: Baseline, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(LyingProposer(lie, vocab_size=VOCAB), attention_backend="sdpa")
    with caplog.at_level(logging.WARNING, logger="specdec"):
        outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == tokens(baseline(PROMPTS, GREEDY))
    assert engine.stats().num_proposer_faults == engine.config.max_proposer_faults
    assert engine.stats().speculation_disabled
    assert engine.stats().num_draft_tokens == 0
    assert sum("switched off" in record.message for record in caplog.records) == 1


def test_rare_faults_do_not_switch_a_proposer_off(start: Start, baseline: Baseline, runs: Runs) -> None:
    engine = start(RaisingProposer(oracle(runs), every=3))
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    stats = engine.stats()
    assert stats.num_proposer_faults >= 2
    assert not stats.speculation_disabled
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("right", "warnings"), [(0, 1), (1, 0)])
def test_drafts_in_vain_are_told_of_once(
    start: Start, runs: Runs, caplog: pytest.LogCaptureFixture, right: int, warnings: int
) -> None:
    """Known bug 59: a head that does not fit its target runs without a word, and nothing is ever accepted."""
    engine = start(oracle(runs, right))
    with caplog.at_level(logging.WARNING, logger="specdec"):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.stats().num_drafts > DRAFTS_IN_VAIN
    assert sum("drafts was accepted" in record.getMessage() for record in caplog.records) == warnings


@pytest.mark.parametrize("error", [ValueError("boom"), KeyError("x"), MemoryError(), AssertionError(), SystemExit(3)])
def test_any_exception_is_contained(start: Start, baseline: Baseline, runs: Runs, error: BaseException) -> None:
    def make() -> BaseException:
        return error

    engine = start(RaisingProposer(oracle(runs), error=make))
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert engine.stats().speculation_disabled


def test_a_slow_proposer_is_switched_off(start: Start, baseline: Baseline, runs: Runs) -> None:
    engine = start(SlowProposer(oracle(runs), 0.05), proposer_time_budget=0.01)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert engine.stats().speculation_disabled
    unlimited = start(SlowProposer(oracle(runs), 0.005), proposer_time_budget=0)
    assert tokens(unlimited.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert not unlimited.stats().speculation_disabled


@pytest.mark.parametrize("needs", [Needs(every_step=True), Needs(hidden_states=True), Needs()])
def test_a_proposer_that_runs_a_model_may_take_as_long_as_the_target(start: Start, runs: Runs, needs: Needs) -> None:
    """On a slow machine both are slow; a lookup has no reason to be."""
    inner = oracle(runs)
    inner.needs = needs
    engine = start(SlowProposer(inner, 0.02), proposer_time_budget=0.01)
    target = engine._engine.core.parts.target
    forward = target.forward

    def slow_forward(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.03)
        return forward(*arguments, **more)

    target.forward = slow_forward  # type: ignore[method-assign]
    engine.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert engine.stats().speculation_disabled is (needs == Needs())


def test_start_and_finish_may_fail_too(start: Start, baseline: Baseline, runs: Runs) -> None:
    proposer = oracle(runs)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    proposer.start = fail  # type: ignore[method-assign]
    proposer.finish = fail  # type: ignore[method-assign]
    engine = start(proposer)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))


def test_a_stat_logger_that_raises_is_switched_off(start: Start, baseline: Baseline) -> None:
    class Faulty(StatLogger):
        calls = 0

        def record(self, step: StepStats) -> None:
            self.calls += 1
            raise RuntimeError("on purpose")

    faulty = Faulty()
    engine = start()
    engine._engine.core._loggers = (faulty,)
    assert tokens(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(baseline(PROMPTS, GREEDY))
    assert faulty.calls == 1


def test_a_stat_logger_may_fail_to_close(model: str) -> None:
    class Faulty(StatLogger):
        def record(self, step: StepStats) -> None:
            pass

        def close(self) -> None:
            raise RuntimeError("on purpose")

    engine = LLM(model, dtype="float32", max_model_len=64, kv_cache_memory="1MiB", stat_loggers=())
    engine._engine.core._loggers = (Faulty(),)
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate([5], GREEDY, use_tqdm=False)
