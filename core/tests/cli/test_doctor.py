"""`specdec doctor` on a tiny random model; what it predicts from given measurements."""

import json
import shlex
import tomllib

import attrs
import pytest
import torch

from specdec import SamplingParams
from specdec.cli import diagnosis, doctor
from specdec.cli.diagnosis import Diagnosis, MethodFacts, StepTimes, measured_lengths
from specdec.cli.prompts import Prompt
from specdec.config import EngineConfig, SpeculativeConfig
from specdec.drafting import Proposer
from specdec.errors import ConfigError
from specdec.testing import chain_draft
from specdec.types import Draft, ProposerCapabilities

FAST = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--num-threads", "1", "--max-model-len", "120"]
SHORT = ["--num-prompts", "1", "--max-tokens", "24", "--rounds", "1", "--num-speculative-tokens", "2", "--raw"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from specdec.testing.models import tiny_model

    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the quick brown fox and the quick brown fox"}\n', encoding="utf-8")
    return str(path)


def facts(acceptance=(0.8, 0.6), share=1.0, first=0.1, last=0.2, drafted=None):
    return MethodFacts(
        name="ngram",
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
        draft_share=share,
        acceptance=acceptance,
        drafted=tuple([1.0] * len(acceptance)) if drafted is None else drafted,
        draft_seconds_first=first,
        draft_seconds_last=last,
    )


TIMES = StepTimes(batch_size=1, seconds={0: 1.0, 1: 1.2, 2: 1.4, 4: 2.0})


def test_prediction():
    """Tokens over time, by hand."""
    assert facts().speed_up(1, TIMES) == pytest.approx(1.8 / (0.1 + 1.2))
    assert facts().speed_up(2, TIMES) == pytest.approx(2.4 / (0.2 + 1.4))
    # with shorter drafts the same text takes more steps that have one: 1.2 of 1.7 tokens come out of 1.8 tokens a step
    shorter = (1.2 / 1.7 / 1.8) / (1.2 / 1.7 / 1.8 + 0.5 / 1.7)
    assert facts(share=0.5).share(1) == pytest.approx(shorter)
    assert facts(share=0.5).share(2) == pytest.approx(0.5)
    half_as_long = facts(drafted=(1.0, 0.5))  # 1.5 rows more on average, between two lengths that were measured
    assert half_as_long.speed_up(2, TIMES) == pytest.approx(2.4 / (0.2 + 1.3))
    assert facts(share=0.5).speed_up(2, TIMES) == pytest.approx((1 + 0.5 * 1.4) / (0.2 + 0.5 * 1.0 + 0.5 * 1.4))
    assert facts().best(TIMES)[0] == 2
    assert TIMES.at(3) == pytest.approx(1.7)


def test_a_trees_k_counts_its_nodes():
    """Of two levels with three nodes, all are verified, and what is recommended is the three, not the two."""
    tree = attrs.evolve(facts(drafted=(2.0, 1.0)), num_nodes=3)
    assert tree.lengths == (3,)
    assert tree.tokens(3) == pytest.approx(2.4)
    assert tree.draft_seconds(3) == pytest.approx(0.2)
    assert tree.speed_up(3, TIMES) == pytest.approx(2.4 / (0.2 + 1.7))
    assert tree.best(TIMES)[0] == 3
    found = Diagnosis(step_times=(TIMES,), methods=(tree,))
    assert found.recommended(1)[1] == 3
    assert "num_speculative_tokens = 3" in doctor.snippet(tree, 3)
    assert found.why_not(tree, TIMES).startswith("at its best k=3 nodes a step gains 1.40 tokens")
    assert attrs.evolve(tree, acceptance=()).lengths == ()


def test_step_time_is_measured_up_to_the_longest_draft():
    """Beyond what was measured nothing could be said but the last value."""
    assert measured_lengths(2) == [0, 1, 2]
    assert measured_lengths(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]


def test_recommendation_and_reason():
    good, bad = facts(), facts(acceptance=(0.1, 0.0))
    assert Diagnosis(step_times=(TIMES,), methods=(bad, good)).recommended(1)[:2] == (good, 2)
    found = Diagnosis(step_times=(TIMES,), methods=(bad,))
    assert found.recommended(1) is None
    assert found.why_not(bad, TIMES) == (
        "at its best k=1 a step gains 0.10 tokens and takes 0.30 of a plain step longer "
        "(drafting 0.10, more rows 0.20): 0.85x"
    )
    assert found.why_not(facts(share=0.0, acceptance=()), TIMES) == "it found nothing to draft on these prompts"


def test_it_measures_and_reports(cli, model, prompts, tmp_path):
    pytest.importorskip("specdec_ngram")
    file = tmp_path / "doctor.json"
    method = ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 1}', "--only-given"]
    argv = [
        "doctor",
        model,
        *FAST,
        *SHORT,
        *method,
        "--prompts",
        prompts,
        "--batch-sizes",
        "1,2",
        "--output-json",
        str(file),
    ]
    code, out, err = cli(*argv)
    assert code == 0, err
    assert "step time relative to a plain step" in out
    assert "Recommended: ngram" in out or "Speculation does not pay here" in out
    result = json.loads(file.read_text())
    assert [times["batch_size"] for times in result["step_times"]] == [1, 2]
    assert set(result["step_times"][0]["relative"]) == {"1", "2", "3"}
    (ngram,) = result["methods"]
    assert ngram["method"] == "ngram"
    if result["recommended"]:
        assert result["recommended"]["config"].startswith('[speculative]\nmethod = "ngram"')
        assert result["recommended"]["measured_speed_up"] > 0


def report(capsys, best, measured):
    skipped = {"incomplete": {"eagle": "model"}, "refused": {"x": "no [heads]"}}
    found = Diagnosis(step_times=(TIMES,), methods=(facts(),), **skipped)
    doctor.show("demo:smollm2", found, best, measured)
    return capsys.readouterr().out


def test_the_recommendation_can_be_pasted(capsys):
    members = [{"method": "ngram", "prompt_lookup_max": 4}, {"method": "suffix"}]
    composite = SpeculativeConfig(method="composite", options={"proposers": members}, num_speculative_tokens=4)
    best = attrs.evolve(facts(), name="composite", speculative=composite)
    out = report(capsys, (best, 2, 1.5), {"speed_up": 1.4, "speed_up_with_prompts": 1.2})
    assert "Recommended: composite with k=2: predicted 1.50x, measured 1.40x (1.20x with the time for the " in out
    assert "not tried: eagle; they need options" in out
    assert "not tried: x: no [heads]" in out
    pasted = tomllib.loads(out[out.index("model = ") : out.index("or on the command line")])
    wanted = {"method": "composite", "num_speculative_tokens": 2, "proposers": members}
    assert pasted == {"model": "demo:smollm2", "speculative": wanted}
    assert json.loads(shlex.split(out[out.index("--speculative-config") :])[1]) == wanted


def test_what_does_not_pay_is_not_recommended(capsys):
    out = report(capsys, None, None)
    assert "Speculation does not pay here (batch size 1).\n  ngram: at its best k=2" in out
    out = report(capsys, (facts(), 2, 1.1), {"speed_up": 0.98, "speed_up_with_prompts": 0.99})
    assert "Speculation does not pay here (batch size 1), though it might have" in out
    assert "Recommended" not in out
    assert "[speculative]" not in out


def test_the_prompts_must_leave_room(model):
    config = EngineConfig(model=model, dtype="float32", kv_cache_memory="8MiB", max_model_len=42, max_num_seqs=2)
    work = {"params": SamplingParams(), "k": 2, "rounds": 1, "advance": lambda name: None}
    prompts = [Prompt(id="long", token_ids=tuple(range(2, 42)))]
    with pytest.raises(ConfigError, match="max_model_len is 42: the prompts leave no room in it"):
        diagnosis.measure_step_times(config, prompts, batch_sizes=(1,), **work)
    with pytest.raises(ConfigError, match="max_num_seqs is 2, fewer than the 3 requests"):
        diagnosis.measure_step_times(config, prompts, batch_sizes=(1, 3), **work)


def test_methods_do_not_see_their_prompts_twice(cli, model, prompts, tmp_path):
    """A method that learns from finished requests would know the answer the second time."""
    seen = []

    class Learner(Proposer):
        capabilities = ProposerCapabilities(keeps_finished_requests=True)

        def propose(self, batch):
            return chain_draft([[] for _ in batch.request_ids])

        def complete(self, request_id, token_ids):
            seen.append(token_ids.tolist())

    config = EngineConfig(model=model, dtype="float32", kv_cache_memory="8MiB", max_model_len=120)
    speculative = SpeculativeConfig(method="learner", num_speculative_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=6)
    given = [Prompt(id=str(i), token_ids=(5, 6, 7 + i)) for i in range(2)]
    diagnosis.measure_method(config, speculative, given, params, lambda name: None, Learner())
    assert [tokens[:3] for tokens in seen] == [[5, 6, 7], [5, 6, 8]]


def test_a_method_that_drafts_trees_is_measured_in_nodes(model):
    class Pairs(Proposer):
        capabilities = ProposerCapabilities(trees=True)

        def propose(self, batch):
            """Two guesses at the next token."""
            counts = [min(int(limit), 2) for limit in batch.max_draft_tokens]
            return Draft(
                token_ids=torch.cat([torch.arange(5, 5 + count) for count in counts]),
                num_draft_tokens=torch.tensor(counts, dtype=torch.int32),
                parents=torch.full((sum(counts),), -1, dtype=torch.int32),
            )

    config = EngineConfig(model=model, dtype="float32", kv_cache_memory="8MiB", max_model_len=120)
    speculative = SpeculativeConfig(method="pairs", num_speculative_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=6)
    found = diagnosis.measure_method(
        config, speculative, [Prompt(id="0", token_ids=(5, 6, 7))], params, lambda name: None, Pairs()
    )
    assert (found.num_nodes, len(found.acceptance), found.drafted) == (2, 1, (2.0,))
    assert found.lengths == (2,)


def test_a_method_is_needed_with_only_given(cli, model):
    code, _, err = cli("doctor", model, "--only-given")
    assert (code, err) == (2, "error: --only-given needs a method, with --speculative-config or --also.\n")


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from specdec.cli.plot import draw_diagnosis

    result = {
        "step_times": [{"batch_size": 1, "plain_ms": 10.0, "relative": {"1": 1.0, "2": 1.1}}],
        "methods": [{"method": "ngram", "predicted_speed_up": {"1": {"1": 1.4}}}],
        "recommended": {"num_speculative_tokens": 1, "measured_speed_up": 1.3},
    }
    draw_diagnosis(result, tmp_path / "doctor.png", title="tiny")
    assert (tmp_path / "doctor.png").stat().st_size > 5000
