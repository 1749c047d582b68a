"""``specdec bench`` on an engine that needs no model."""

import json

import pytest

from specdec.cli import measuring
from specdec.cli.bench import show
from specdec.cli.prompts import bundled_sets, read_set
from specdec.cli.tables import accepted_at, stats_rows
from specdec.config import SpeculativeConfig, from_kwargs
from specdec.errors import ConfigError
from specdec.metrics import EngineStats
from specdec.types import SpecStats

METHOD = ["--speculative.method", "ngram"]


def test_the_table(cli, fake_engine):
    code, out, err = cli("bench", "m", *METHOD, "--num-prompts", "4", "--rounds", "2")
    assert (code, err) == (0, "")
    for label in (
        "tokens/s",
        "ratio of medians",
        "acceptance length",
        "accepted at position, of all drafts",
        "propose ms/step",
        "identical",
    ):
        assert label in out
    assert "100%" in out
    assert "2.00" in out
    assert [engine.config.speculative is None for engine in fake_engine] == [True, False]
    assert all(engine.closed for engine in fake_engine)


def test_the_settings_stand_above_the_table(cli, fake_engine):
    options = ["--num-prompts", "3", "--max-tokens", "32", "--rounds", "2", "--batch-size", "2", "--temperature", "0.5"]
    _, out, _ = cli("bench", "m", *METHOD, "--also", '{"method": "ngram", "num_speculative_tokens": 9}', *options)
    first = out.splitlines()[0]
    threads = first.partition(" thread")[0].rpartition(" ")[2]
    assert int(threads) > 0
    plural = "thread" if threads == "1" else "threads"
    assert first == (
        f"m, bfloat16 on cpu, {threads} {plural}: 3 prompts of code_edit, at most 32 tokens each, batch size 2, "
        "temperature 0.5, 2 rounds; plain against ngram, ngram k=9"
    )


@pytest.mark.parametrize(
    ("drafted", "shown"),
    [((4, 4), "50 25 %"), ((4, 2), "50 25 % (100 50 % drafted)"), ((), "50 25 %"), ((8, 2), "50 25 %")],
)
def test_acceptance_at_a_position_is_of_all_drafts(drafted, shown):
    """As in vLLM and the glossary; where drafts differ in length it says how many got there."""
    counts = {"num_drafts": 4, "num_accepted_tokens_per_pos": (2, 1), "num_draft_tokens_per_pos": drafted}
    assert accepted_at(SpecStats(**counts)) == shown
    assert dict(stats_rows(EngineStats(**counts), 1.0))["accepted at position"] == f"{shown} of all drafts"


def test_times_of_stages_are_told_per_step() -> None:
    stats = EngineStats(num_steps=4, target_seconds=0.06, verify_seconds=0.02, propose_seconds=0.01, rest_seconds=0.01)
    told = "4; ms per step: target 15.00, verify 5.00, propose 2.50, rest 2.50"
    assert dict(stats_rows(stats, 1.0))["steps"] == told


def test_turns_alternate_and_seeds_are_shared(monkeypatch, fake_engine):
    from specdec.sampling.params import SamplingParams

    order = []
    config = from_kwargs("m")
    variants = measuring.variants_of(config, [SpeculativeConfig(method="a"), SpeculativeConfig(method="b")])
    measuring.measure(
        variants,
        read_set("code_edit")[:3],
        SamplingParams(max_tokens=4),
        rounds=3,
        batch_size=2,
        advance=lambda variant, count: order.append((variant.name, count)),
    )
    assert [name for name, _ in order[:6]] == ["plain", "a", "b", "a", "b", "plain"]
    turns = [name for name, count in order if count == 2]
    assert turns == ["plain", "a", "b", "a", "b", "plain", "b", "plain", "a"]
    for engine in fake_engine:
        warm_up, *rest = engine.calls
        assert warm_up[1].max_tokens == 8
        assert [[p.seed for p in params] for _, params, _ in rest] == [[0, 1], [2]] * 3
    assert [run.round for run in variants[0].runs] == [0, 1, 2]
    assert variants[1].stats.num_drafts == 9


def test_prefix_caching_is_off_unless_asked_for(cli, fake_engine):
    cli("bench", "m", *METHOD)
    cli("bench", "m", *METHOD, "--enable-prefix-caching")
    assert [engine.config.enable_prefix_caching for engine in fake_engine] == [False, False, True, True]


def test_more_configurations(cli, fake_engine):
    _, out, _ = cli("bench", "m", *METHOD, "--also", '{"method": "ngram", "num_speculative_tokens": 8}')
    assert "ngram k=8" in out
    assert [e.config.speculative and e.config.speculative.most_draft_tokens for e in fake_engine] == [None, 4, 8]


def test_different_outputs_are_counted(fake_engine, monkeypatch):
    from specdec.sampling.params import SamplingParams

    variants = measuring.variants_of(from_kwargs("m"), [SpeculativeConfig(method="a")])

    def drift(self, *args, **kwargs):
        self.drifts = True
        return original(self, *args, **kwargs)

    from specdec.cli import engines

    original = engines.open_llm.generate
    monkeypatch.setattr(engines.open_llm, "generate", drift)
    measuring.measure(variants, read_set("mt_bench")[:4], SamplingParams(), rounds=1, batch_size=4)
    assert measuring.share_identical(variants[1], variants[0]) == 0.75
    assert measuring.summary(variants[1], variants[0])["share_identical_to_plain"] == 0.75


def test_json_holds_settings_machine_and_numbers(cli, fake_engine, tmp_path):
    code, _, _ = cli("bench", "m", *METHOD, "--output-json", "out.json", "--num-prompts", "2", "--rounds", "2")
    assert code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["settings"]["num_prompts"] == 2
    assert found["machine"]["cores"] >= 1
    assert "torch" in found["machine"]["versions"]
    plain, ngram = found["variants"]
    assert plain["name"] == "plain"
    assert plain["acceptance_length"] == 1.0
    assert ngram["config"]["speculative"]["method"] == "ngram"
    assert ngram["acceptance_rate_per_pos"] == [1.0, 0.0]
    assert len(ngram["tokens_per_second_per_round"]) == 2
    _, out, _ = cli("bench", "m", *METHOD, "--output-json", "-")
    assert json.loads(out)["variants"]


def test_a_picture_is_drawn(cli, fake_engine, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli("bench", "m", *METHOD, "--plot", "out.png")[0] == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--output-json", "nowhere/out.json", "cannot write nowhere/out.json: there is no folder nowhere."),
        ("--output-json", ".", "cannot write .: it is a folder."),
        ("--plot", ".", "cannot write .: it is a folder."),
        ("--plot", "out.nosuch", "--plot out.nosuch: there is no format '.nosuch'; there are "),
    ],
)
def test_files_that_cannot_be_written_are_told_before_measuring(cli, fake_engine, option, file, message):
    code, out, err = cli("bench", "m", *METHOD, option, file)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert fake_engine == []


def test_a_missing_plot_library_is_told_before_measuring(cli, fake_engine, monkeypatch):
    monkeypatch.setattr("specdec.cli.plot.find_spec", lambda name: None)
    code, _, err = cli("bench", "m", *METHOD, "--plot", "out.png")
    assert (code, err) == (2, 'error: --plot needs matplotlib: pip install "specdec-core[plot]".\n')
    assert fake_engine == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m"], "no method is set. Add for example --speculative.method ngram"),
        (["m", *METHOD, "--rounds", "0"], "--rounds: '0' is not an integer of at least 1"),
        (["m", *METHOD, "--prompts", "code_edt"], "Did you mean 'code_edit'?"),
        (["m", *METHOD, "--also", "{"], "--also '{': must be a JSON object"),
        (["m", "--also", '{"method": "x", "num_speculative_tokens": 99}'], "must be an integer from 1 to 64"),
        (["m", *METHOD, "--output-json", "no/such/folder.json"], "there is no folder"),
        (["m", *METHOD, "--temperature", "-1"], "temperature is -1.0"),
    ],
)
def test_mistakes_are_told_before_measuring(cli, fake_engine, argv, message):
    code, _, err = cli("bench", *argv)
    assert code == 2
    assert message in err
    assert fake_engine == []


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ('{"method": "nosuch"}', "No proposer named 'nosuch'"),
        ('{"method": "ngram", "prompt_lookup_max": "x"}', "prompt_lookup_max = 'x' (--also): must be an integer"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_all_methods_are_checked_before_measuring(command, also, message, cli, monkeypatch):
    pytest.importorskip("specdec_ngram")
    monkeypatch.setattr("specdec.cli.measuring.variants_of", None)
    monkeypatch.setattr("specdec.cli.diagnosis.measure_step_times", None)
    code, _, err = cli(command, "m", *METHOD, "--also", also)
    assert code == 2
    assert message in err


def test_what_one_engine_refuses_is_told_before_another_is_loaded(cli, fake_engine, monkeypatch):
    def refuse(config):
        if config.speculative is not None:
            raise ConfigError("a head for another model")

    monkeypatch.setattr("specdec.cli.engines.check", refuse)
    code, _, err = cli("bench", "m", *METHOD)
    assert (code, err) == (2, "error: a head for another model\n")
    assert fake_engine == []


def test_bundled_sets_are_conversations():
    assert bundled_sets() == ["code_edit", "mt_bench"]
    for name in bundled_sets():
        prompts = read_set(name)
        assert len(prompts) == 12
        assert all(prompt.messages and prompt.task for prompt in prompts)
    assert read_set("mt_bench")[0].as_text().text.startswith("Compose an engaging travel blog post")


def test_nothing_drafted_is_not_a_division_by_zero():
    variant = measuring.Variant("plain", from_kwargs("m"))
    variant.runs.append(measuring.Run(round=0, seconds=0.0, num_tokens=0, stats=EngineStats()))
    numbers = measuring.summary(variant, variant)
    assert numbers["ratio_of_medians"] == 0.0
    assert numbers["acceptance_length"] == 1.0
    json.dumps(numbers, allow_nan=False)


def test_the_time_to_the_first_token_does_not_count_as_decoding(fake_engine):
    from specdec.sampling.params import SamplingParams

    (variant,) = measuring.variants_of(from_kwargs("m"), [])
    measuring.measure([variant], read_set("mt_bench")[:2], SamplingParams(), rounds=1, batch_size=2)
    (run,) = variant.runs
    slower = measuring.Run(round=0, seconds=9.0, num_tokens=20, stats=run.stats, num_decoded=18, decode_seconds=6.0)
    assert run.num_decoded == run.num_tokens - 2
    assert slower.decode_rate == 3.0


MEMBER = {
    "num_drafts": 4,
    "num_draft_tokens": 8,
    "num_accepted_tokens": 3,
    "num_accepted_tokens_per_pos": [2, 1],
    "propose_seconds": 0.25,
}


def test_members_of_a_proposer_are_shown(capsys):
    members = {"ngram": MEMBER, "suffix": {**MEMBER, "is_on": False}}
    variants = [measuring.Variant(name, from_kwargs("m")) for name in ("plain", "composite")]
    for variant, found in zip(variants, ({}, {"members": members}), strict=True):
        variant.runs.append(measuring.Run(round=0, seconds=1.0, num_tokens=2, stats=EngineStats(proposer=found)))
    show("what was measured", [measuring.summary(variant, variants[0]) for variant in variants])
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "members of composite" in lines
    assert "ngram 4 8 3 50 25 % 0.250" in lines
    assert any(line.startswith("suffix (switched off) 4") for line in lines)
    told = dict(stats_rows(variants[1].stats, 1.0))
    assert told["  of ngram"] == "4 drafts, 3 of 8 draft tokens accepted"


def test_variants_of_one_configuration_share_an_engine(fake_engine):
    """Draft lengths that requests ask for need no engine each."""
    from specdec.sampling.params import SamplingParams

    config = from_kwargs("m")
    lengths = [measuring.Variant(f"k={k}", config, speculation={"num_speculative_tokens": k}) for k in (1, 2)]
    measuring.measure(lengths, read_set("mt_bench")[:2], SamplingParams(), rounds=1, batch_size=2)
    (engine,) = fake_engine
    asked = [speculation for speculation in engine.speculation if speculation is not None]
    assert asked == [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 2}]
