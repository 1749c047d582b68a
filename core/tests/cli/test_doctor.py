"""`specdec doctor` on a tiny random model; what it predicts from given measurements."""

import json

import pytest

from specdec.cli.diagnosis import Diagnosis, MethodFacts, StepTimes
from specdec.config import SpeculativeConfig

FAST = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--num-threads", "1", "--max-model-len", "120"]
SHORT = ["--num-prompts", "1", "--max-tokens", "24", "--rounds", "1", "--max-draft-tokens", "2", "--raw"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from specdec.testing.models import tiny_model

    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the quick brown fox and the quick brown fox"}\n', encoding="utf-8")
    return str(path)


def facts(acceptance=(0.8, 0.6), share=1.0, first=0.1, last=0.2):
    return MethodFacts(
        name="ngram",
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2),
        draft_share=share,
        acceptance=acceptance,
        draft_seconds_first=first,
        draft_seconds_last=last,
    )


TIMES = StepTimes(batch_size=1, seconds={0: 1.0, 1: 1.2, 2: 1.4, 4: 2.0})


def test_prediction():
    """Tokens over time, by hand."""
    assert facts().speed_up(1, TIMES) == pytest.approx(1.8 / (0.1 + 1.2))
    assert facts().speed_up(2, TIMES) == pytest.approx(2.4 / (0.2 + 1.4))
    assert facts(share=0.5).speed_up(2, TIMES) == pytest.approx((1 + 0.5 * 1.4) / (0.2 + 0.5 * 1.0 + 0.5 * 1.4))
    assert facts().best(TIMES)[0] == 2
    assert TIMES.at(3) == pytest.approx(1.7)


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
    argv = ["doctor", model, *FAST, *SHORT, *method, "--prompts", prompts, "--batch-sizes", "1,2", "--json", str(file)]
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
